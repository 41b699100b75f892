"""A second engine's acceptance by position against the baseline's, block by block."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nwor_bench.analysis.analyse import acceptance_changes


def data(rates: tuple[float, ...], seed: int, blocks: int = 8) -> Any:
    """Windows of 200 requests in each block that accept drafts at these rates."""
    rng = np.random.default_rng(seed)
    windows = [
        SimpleNamespace(
            block=block,
            drafts_per_position=(200,) * len(rates),
            accepted_per_position=tuple(int(rng.binomial(200, rate)) for rate in rates),
        )
        for block in range(1, blocks + 1)
        for _ in range(5)
    ]
    timed = [SimpleNamespace(block=block) for block in range(1, blocks + 1)]
    return SimpleNamespace(timed=timed, windows=windows)


def test_a_drafter_that_is_off_by_one_place_is_told_at_every_position() -> None:
    """Planted: a wrong drafter accepts next to nothing."""
    changes = acceptance_changes(data((0.02, 0.0), 1), data((0.6, 0.4), 2))
    assert [change.value for change in changes] == pytest.approx([-0.58, -0.4], abs=0.03)
    assert all(change.high < -0.3 for change in changes)


def test_equal_drafts_differ_by_nothing_and_few_blocks_have_no_interval() -> None:
    same = data((0.6, 0.4), 3)
    assert [(c.value, c.low, c.high) for c in acceptance_changes(same, same)] == [(0, 0, 0)] * 2
    few = data((0.6,), 4, blocks=2)
    assert not acceptance_changes(few, few)[0].is_bounded


def test_intervals_include_the_truth_and_positions_of_both_count() -> None:
    hits = 0
    for seed in range(100):
        (change,) = acceptance_changes(data((0.55,), seed), data((0.5, 0.3), 1000 + seed))
        hits += change.holds(0.05)
    assert hits >= 90


def test_a_block_in_which_nothing_was_drafted_leaves_the_others_theirs() -> None:
    """Prompt lookup may find nothing in a block, or fewer drafts than in the next."""
    ours, theirs = data((0.6, 0.4), 5), data((0.6, 0.4), 6)
    for window in ours.windows:
        if window.block == 1:
            window.drafts_per_position = window.accepted_per_position = ()
        if window.block < 4:
            window.drafts_per_position = window.drafts_per_position[:1]
            window.accepted_per_position = window.accepted_per_position[:1]
    assert [change.count for change in acceptance_changes(ours, theirs)] == [7, 5]
