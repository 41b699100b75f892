"""Acceptance by position within its interval: what passes, what does not, and how often."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic_run import make_run

from nwor_bench.analysis.parity.acceptance import (
    Acceptance,
    BatchSums,
    ParitySums,
    acceptance_of,
    acceptance_outside,
    half_width,
)
from nwor_bench.records.types import Cell, NworMode, ScvMode

DRAFTS = 4
SOUND = (200, 120, 70, 30)
STAGE = Cell("toy", NworMode.STAGE, ScvMode.OFF)
Counts = tuple[Sequence[int] | None, int | None]


def added(sums: ParitySums, counts: Acceptance, *prompts: int, cell: Cell = STAGE) -> str | None:
    return sums.add(cell, BatchSums(tuple(map(str, prompts)), (), counts, 0), None)


def beside(ours: Counts, theirs: Counts, diverged: tuple[int, ...] = ()) -> Acceptance:
    known = [None if a is None else tuple(int(count) for count in a) for a, _ in (ours, theirs)]
    return Acceptance(known[0], ours[1], known[1], theirs[1], diverged, 1024)


def test_a_drafters_tie_passes() -> None:
    """One draft more accepted, and a window less: what one tie of a bf16 drafter does."""
    assert acceptance_outside(beside(((200, 120, 70, 31), 299), (SOUND, 300))) is None


def test_a_position_that_lost_its_acceptance_is_named() -> None:
    text = acceptance_outside(beside(((200, 120, 10, 5), 300), (SOUND, 300)))
    assert text is not None
    assert text.startswith(
        "accepted per position: draft 3 10 of 300 times, 70 of 300 with off x off in 1 batches"
    )


def test_more_acceptance_than_off_is_no_better() -> None:
    assert acceptance_outside(beside(((300, 300, 300, 300), 300), (SOUND, 300)))


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
def test_what_was_not_measured_equals_only_itself(
    ours: Counts, theirs: Counts, passes: bool
) -> None:
    assert (acceptance_outside(beside(ours, theirs)) is None) is passes


def test_a_small_loss_in_every_batch_is_seen_in_all_together() -> None:
    """10 % less at the first position: within the interval of 300 windows, not of 3,000."""
    check = ParitySums()
    batch = beside(((180, 108, 63, 27), 300), (SOUND, 300))
    found = [added(check, batch, number) for number in range(20)]
    assert found[0] is None
    assert found[-1] is not None
    assert "in 20 batches" in found[-1]
    other = replace(STAGE, scv_mode=ScvMode.GRAPH)
    assert added(check, batch, 1, cell=other) is None


def test_a_block_that_repeats_a_prompt_is_no_further_evidence() -> None:
    check = ParitySums()
    batch = beside(((180, 108, 63, 27), 300), (SOUND, 300))
    assert [added(check, batch, 1, number) for number in range(2, 22)] == [None] * 20


def test_a_batch_that_was_not_measured_leaves_the_sum_unmeasured() -> None:
    none = beside((None, None), (None, None))
    both = none.plus(beside((SOUND, 300), (SOUND, 300)))
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


def rates(random: np.random.Generator, requests: int) -> np.ndarray:
    """Requests differ widely: mean 0.62, standard deviation 0.18."""
    return random.beta(4, 2.5, requests)


LENGTH = 128


def flagged_when_sound(trial: int, requests: int, diverging: float) -> bool:
    """Both cells of equal rates; some requests go on with other text, whose rate is drawn anew."""
    random = np.random.default_rng(trial)
    ours, theirs = Decoding(2 * trial), Decoding(2 * trial)
    diverged = []
    for rate in rates(random, requests):
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
@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(
    "diverging", [0.0, *(pytest.param(share, marks=pytest.mark.long) for share in (0.5, 1.0))]
)
def test_sound_cells_are_not_flagged(requests: int, diverging: float) -> None:
    trials = 300
    flagged = sum(flagged_when_sound(trial, requests, diverging) for trial in range(trials))
    assert flagged == 0


@pytest.mark.slow  # many simulated runs
@pytest.mark.parametrize(
    ("diverging", "batches"), [(0, 1), pytest.param(4, 10, marks=pytest.mark.long)]
)
def test_one_accepted_token_too_few_is_seen(diverging: int, batches: int) -> None:
    """8 requests of 128 tokens, of which `diverging` leave the reference half way."""
    trials, seen = 60, 0
    for trial in range(trials):
        check = ParitySums()
        found = None
        for batch in range(batches):
            random = np.random.default_rng(100 * trial + batch)
            ours, theirs = Decoding(trial + 7919 * batch), Decoding(trial + 104729 * (batch + 1))
            for rate in rates(random, 8):
                ours.run(rate, LENGTH, committed_too_few=1)
                theirs.run(rate, LENGTH)
            counts = beside(ours.counts(), theirs.counts(), (LENGTH // 2,) * diverging)
            found = found or added(check, counts, batch)
        seen += found is not None
    assert seen / trials >= 0.98
