"""Acceptance by position, in batches and in interleaved windows: what passes, and what does not."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from interleaved_run import CONTROL, OFF, STAGE_GRAPH, Planted, group_windows, interleaved_run
from synthetic_run import AA_CELL, faults_of, make_run

from nwor_bench.analysis.invariants import find_violations
from nwor_bench.analysis.parity.acceptance import (
    Acceptance,
    BatchSums,
    ParitySums,
    acceptance_of,
    acceptance_outside,
    acceptance_violations,
    half_width,
)
from nwor_bench.records.cell import Drafts
from nwor_bench.records.types import Cell, NworMode, ScvMode, WindowRecord

DRAFTS = 4
SOUND = (200, 120, 70, 30)
STAGE = Cell("toy", NworMode.STAGE, ScvMode.OFF)
Counts = tuple[Sequence[int] | None, int | None]


def added(sums: ParitySums, counts: Acceptance, *prompts: int, cell: Cell = STAGE) -> str | None:
    return sums.add(cell, BatchSums(tuple(map(str, prompts)), (), counts, 0), None)


def beside(
    ours: Counts, theirs: Counts = (SOUND, 300), diverged: tuple[int, ...] = ()
) -> Acceptance:
    known = [None if a is None else tuple(int(count) for count in a) for a, _ in (ours, theirs)]
    return Acceptance(known[0], ours[1], known[1], theirs[1], diverged, 1024)


def test_the_counts_are_vllms_own() -> None:
    batch = make_run(blocks=1).batches[0]
    fewer = replace(batch, vllm_accepted_per_position=(1, 0, 0, 0), vllm_num_drafts=77)
    found = acceptance_of(fewer, batch, (5,), 40)
    assert (found.accepted, found.drafts) == ((1, 0, 0, 0), 77)
    assert found.expected_accepted == batch.vllm_accepted_per_position
    assert found.expected_drafts == batch.vllm_num_drafts
    assert (found.diverged, found.tokens, found.batches) == ((5,), 40, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "passes"),
    [
        (((200, 120, 70, 31), 299), (SOUND, 300), True),  # one tie of a bf16 drafter
        (((200, 120, 10, 5), 300), (SOUND, 300), False),
        (((300, 300, 300, 300), 300), (SOUND, 300), False),  # more than off is no better
        ((None, None), (None, None), True),
        ((None, None), ((1, 1), 9), False),
        (((1, 1), 9), (None, None), False),
        (((1, 1), 9), ((1, 1, 0), 9), False),
        (((0, 0), 0), ((0, 0), 0), True),
        (((0, 0), 0), ((5, 2), 9), False),
        (((5, 2), 9), ((0, 0), 0), False),
        (((), 0), ((), 0), True),
    ],
)
def test_what_lies_outside_chance_or_was_not_measured(
    ours: Counts, theirs: Counts, passes: bool
) -> None:
    found = acceptance_outside(beside(ours, theirs))
    assert (found is None) is passes
    if ours[0] == (200, 120, 10, 5):
        assert str(found).startswith(
            "accepted per position: draft 3 10 of 300 times, 70 of 300 with off x off in 1 batches"
        )


def test_a_small_loss_in_every_batch_is_seen_in_all_together() -> None:
    """10 % less at the first position: within the interval of 300 windows, not of 3,000."""
    check, batch = ParitySums(), beside(((180, 108, 63, 27), 300))
    found = [added(check, batch, number) for number in range(20)]
    assert found[0] is None
    assert "in 20 batches" in str(found[-1])
    assert added(check, batch, 1, cell=replace(STAGE, scv_mode=ScvMode.GRAPH)) is None
    again = ParitySums()  # a block that repeats a prompt is no further evidence
    assert [added(again, batch, 1, number) for number in range(2, 22)] == [None] * 20


def test_a_batch_that_was_not_measured_leaves_the_sum_unmeasured() -> None:
    both = beside((None, None), (None, None)).plus(beside((SOUND, 300)))
    assert (both.accepted, both.drafts, both.expected_accepted) == (None, None, None)
    assert acceptance_outside(both) is None


def test_text_behind_a_tie_widens_the_interval_by_its_share() -> None:
    plain = half_width(60, 100, 60, 100, (), 1e-4)
    assert half_width(60, 100, 60, 100, (0.05,), 1e-4) > plain
    assert half_width(60, 100, 60, 100, (0.5, 0.4), 1e-4) > 1  # nothing left to compare
    assert half_width(600, 1000, 600, 1000, (), 1e-4) < plain / 3


class Decoding:
    """Requests that accept each next draft with a rate of their own, until `length` tokens."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.accepted = np.zeros(DRAFTS, dtype=int)
        self.drafts = 0

    def run(self, rate: float, length: int, committed_too_few: int = 0) -> None:
        tokens = 1
        while tokens < length:
            count = 0
            while count < DRAFTS and self.random.random() < rate:
                count += 1
            kept = max(count - committed_too_few, 0)
            self.accepted[:kept] += 1
            self.drafts += 1
            tokens += kept + 1

    def counts(self) -> Counts:
        return self.accepted.tolist(), self.drafts


LENGTH = 128


def flagged_when_sound(trial: int, requests: int, diverging: float) -> bool:
    """Both cells of equal rates; some requests go on with other text, whose rate is drawn anew."""
    random = np.random.default_rng(trial)
    ours, theirs = Decoding(2 * trial), Decoding(2 * trial)
    diverged = []
    for rate in random.beta(4, 2.5, requests):
        leaves = random.random() < diverging
        shared = int(random.integers(1, LENGTH)) if leaves else LENGTH
        seed = ours.random.bit_generator.state
        ours.run(rate, shared)
        theirs.random.bit_generator.state = seed
        theirs.run(rate, shared)
        if leaves:
            ours.run(random.random(), LENGTH - shared + 1)
            theirs.run(random.random(), LENGTH - shared + 1)
            diverged.append(LENGTH - shared)
    found = beside(ours.counts(), theirs.counts(), tuple(diverged))
    return acceptance_outside(replace(found, tokens=requests * LENGTH)) is not None


@pytest.mark.slow  # many simulated runs
@pytest.mark.parametrize(("requests", "diverging"), [(1, 1.0), (8, 0.0), (8, 0.5)])
def test_sound_cells_are_not_flagged(requests: int, diverging: float) -> None:
    assert not any(flagged_when_sound(trial, requests, diverging) for trial in range(100))


@pytest.mark.slow  # many simulated runs
def test_one_accepted_token_too_few_is_seen() -> None:
    """8 requests of 128 tokens."""
    for trial in range(40):
        ours, theirs = Decoding(trial), Decoding(104729 + trial)
        for rate in np.random.default_rng(trial).beta(4, 2.5, 8):
            ours.run(rate, LENGTH, committed_too_few=1)
            theirs.run(rate, LENGTH)
        assert added(ParitySums(), beside(ours.counts(), theirs.counts()), 0) is not None


REQUESTS = 8


def accepted(rates: Iterable[float], random: Random) -> tuple[int, ...]:
    """Requests that accept each next draft at their rate, by position."""
    counts = []
    for rate in rates:
        count = 0
        while count < DRAFTS and random.random() < rate:
            count += 1
        counts.append(count)
    return tuple(sum(count > at for count in counts) for at in range(DRAFTS))


def accepting(window: WindowRecord, group: int, row: tuple[int, ...]) -> WindowRecord:
    return replace(
        window, group=group, num_reqs=REQUESTS, accepted_per_position=row,
        drafts_per_position=(REQUESTS,) * DRAFTS,
    )  # fmt: skip


def windows_of(
    rates: Mapping[Cell, float], groups: int, seed: int = 0, sticky: float = 0.0
) -> Iterator[WindowRecord]:
    """Groups of two windows a run, one cell after another beside off.

    Args:
        rates: of acceptance of one draft, by cell; a request's own otherwise (0.3 to 0.9).
        groups: of each cell.
        seed: of the draws.
        sticky: chance that a request has the rate of its last window again.
    """
    random = Random(seed)
    own = [random.uniform(0.3, 0.9) for _ in range(REQUESTS)]
    for number in range(groups):
        for place, cell in enumerate((AA_CELL, CONTROL, STAGE, STAGE_GRAPH)):
            for window in group_windows((OFF, cell), 2):
                own = [r if random.random() < sticky else random.uniform(0.3, 0.9) for r in own]
                row = accepted((rates.get(window.cell, rate) for rate in own), random)
                yield accepting(window, number * 4 + place, row)


def broken(windows: Iterable[WindowRecord]) -> set[Cell]:
    return {cell for cell, _ in acceptance_violations(windows)}


@pytest.mark.parametrize("sticky", [0.0, 0.5, 0.9])
def test_sound_cells_pass_and_so_does_any_aa_arm(sticky: float) -> None:
    for seed in range(3):
        assert broken(windows_of({}, 40, seed, sticky)) == set()
    assert broken(windows_of({AA_CELL: 0.0}, 40)) == set()


def test_a_cell_that_loses_acceptance_in_its_turns_is_named() -> None:
    ((cell, text),) = acceptance_violations(windows_of({STAGE: 0.2}, 20))
    assert cell == STAGE
    assert "stage x off, interleaved windows: accepted per position: draft 1" in text


def test_a_loss_too_small_for_one_cell_is_seen_in_all_that_stage() -> None:
    """5 of 8 first drafts with off, 4 of 8 with each that stages: the rates differ by 0.125.

    Chance explains 4.9 (or 5.2, over four positions) times sqrt(0.48 / n): 0.16 for the 480 drafts
    of one cell, 0.095 for the 1440 of all three.
    """
    windows = [
        replace(window, accepted_per_position=(5 if window.cell in (OFF, AA_CELL) else 4, 0, 0, 0))
        for window in windows_of({}, 15)
    ]
    found = dict(acceptance_violations(windows))
    assert found.keys() == {CONTROL, STAGE, STAGE_GRAPH}
    assert all("all that stage together: accepted" in text for text in found.values())


def test_a_run_whose_cell_loses_acceptance_in_its_turns_is_invalid() -> None:
    run = interleaved_run(Planted({}))
    assert not any("interleaved windows" in text for text in faults_of(run))
    windows = tuple(
        replace(window, accepted_per_position=(0,) * DRAFTS)
        if window.group is not None and window.cell == STAGE_GRAPH
        else window
        for window in run.windows
    )
    found = find_violations(replace(run, windows=windows))
    own = [violation.cell for violation in found if "interleaved windows" in violation.text]
    assert own == [STAGE_GRAPH]


def test_windows_outside_complete_groups_do_not_count() -> None:
    every = list(windows_of({STAGE: 0.0, STAGE_GRAPH: 0.0, CONTROL: 0.0}, 20))
    cut = [window for window in every if window.run != 3]
    none = [replace(window, group=None) for window in every]
    assert broken(every) == {CONTROL, STAGE, STAGE_GRAPH}
    assert broken(cut) == broken(none) == set()


@pytest.mark.parametrize("rate", [0.6, 0.3])
def test_a_staged_draft_count_accepts_what_the_count_in_mode_off_does(rate: float) -> None:
    """Both at 0.6 in sound runs."""
    stock = Cell("toy", NworMode.OFF, ScvMode.OFF, Drafts(4))
    staged, random = replace(stock, nwor_mode=NworMode.STAGE), Random(0)
    windows = [
        accepting(window, number, accepted([own] * REQUESTS, random))
        for number in range(200)
        for window in group_windows((stock, staged), 2)
        for own in [rate if window.cell == staged else 0.6]
    ]
    assert broken(windows) == (set() if rate == 0.6 else {staged})
