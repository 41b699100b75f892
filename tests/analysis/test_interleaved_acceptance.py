"""Acceptance in a cell's interleaved windows beside its neighbours': what is seen, and what not."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest
from interleaved_run import CONTROL, OFF, STAGE_GRAPH, Planted, group_windows, interleaved_run
from synthetic_run import AA_CELL, faults_of

from nwor_bench.analysis.invariants import find_violations
from nwor_bench.analysis.parity.acceptance import acceptance_violations
from nwor_bench.records.cell import Drafts
from nwor_bench.records.types import Cell, NworMode, ScvMode, WindowRecord

STAGE = Cell("toy", NworMode.STAGE, ScvMode.OFF)
REQUESTS, DRAFTS = 8, 4
SOUND: Mapping[Cell, float] = {}


def accepted(rate: float, random: Random) -> int:
    """Leading drafts that are accepted, each at this rate."""
    count = 0
    while count < DRAFTS and random.random() < rate:
        count += 1
    return count


def windows_of(
    rates: Mapping[Cell, float], groups: int, seed: int = 0, sticky: float = 0.0
) -> Iterator[WindowRecord]:
    """Groups of two windows a run, in turn for each cell beside off.

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
                counts = [accepted(rates.get(window.cell, rate), random) for rate in own]
                row = tuple(sum(count > at for count in counts) for at in range(DRAFTS))
                yield replace(
                    window,
                    group=number * 4 + place,
                    num_reqs=REQUESTS,
                    accepted_per_position=row,
                    drafts_per_position=(REQUESTS,) * DRAFTS,
                )


def broken(windows: Iterator[WindowRecord]) -> set[Cell]:
    return {cell for cell, _ in acceptance_violations(windows)}


@pytest.mark.parametrize("sticky", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(5))
def test_sound_cells_pass(sticky: float, seed: int) -> None:
    assert broken(windows_of(SOUND, 40, seed, sticky)) == set()


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
        for window in windows_of(SOUND, 15)
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


def test_the_aa_arm_breaks_nothing() -> None:
    assert broken(windows_of({AA_CELL: 0.0}, 40)) == set()


def test_windows_outside_complete_groups_do_not_count() -> None:
    every = list(windows_of({STAGE: 0.0, STAGE_GRAPH: 0.0, CONTROL: 0.0}, 20))
    cut = [window for window in every if window.run != 3]
    none = [replace(window, group=None) for window in every]
    assert broken(iter(every)) == {CONTROL, STAGE, STAGE_GRAPH}
    assert broken(iter(cut)) == broken(iter(none)) == set()


@pytest.mark.parametrize("rate", [0.6, 0.3])
def test_a_staged_draft_count_accepts_what_the_count_in_mode_off_does(rate: float) -> None:
    """Both at 0.6 in sound runs."""
    stock = Cell("toy", NworMode.OFF, ScvMode.OFF, Drafts(4))
    staged = replace(stock, nwor_mode=NworMode.STAGE)

    def windows(random: Random) -> Iterator[WindowRecord]:
        for number in range(200):
            for window in group_windows((stock, staged), 2):
                own = rate if window.cell == staged else 0.6
                counts = [accepted(own, random) for _ in range(REQUESTS)]
                row = tuple(sum(count > at for count in counts) for at in range(DRAFTS))
                yield replace(
                    window, group=number, num_reqs=REQUESTS, accepted_per_position=row,
                    drafts_per_position=(REQUESTS,) * DRAFTS,
                )  # fmt: skip

    assert broken(windows(Random(0))) == (set() if rate == 0.6 else {staged})
