"""Draft counts set ahead of the step that verifies them, on a scheduler that behaves as vLLM's."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.errors import EngineError
from nwor_bench.instruments.draft_counts import CountSwitch, schedule_of
from nwor_bench.records.cell import AA, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.window_order import (
    PLACE,
    RUNS,
    WindowOrder,
    WindowPlace,
    compared_pairs,
    only_verifies,
)

COUNTS = (0, 1, 2, 4)
CELLS = tuple(Cell("tiny", NworMode.OFF, ScvMode.OFF, arm) for arm in (*map(Drafts, COUNTS), AA))


class Scheduler:
    """Verifies what the step before drafted: the lookup's value while that step was scheduled."""

    def __init__(self, prefills: Sequence[int] = (0,), requests: int = 3):
        self.dynamic_sd_lookup = [0, *COUNTS, 4, 4, 4, 4]
        self._step, self._drafted = 0, 0
        self._prefills = prefills
        self._requests = [f"r{number}" for number in range(requests)]

    def schedule(self) -> Any:
        is_prefill = self._step in self._prefills
        verified = 0 if is_prefill else self._drafted
        drafts = {name: [-1] * verified for name in self._requests} if verified else {}
        tokens = dict.fromkeys(self._requests, 50 if is_prefill else 1 + verified)
        self._step += 1
        self._drafted = self.dynamic_sd_lookup[len(self._requests)]
        return SimpleNamespace(
            scheduled_new_reqs=self._requests if is_prefill else [],
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
        )


STAGED = tuple(
    Cell("tiny", NworMode.STAGE, ScvMode.ADAPTIVE, Drafts(count)) for count in COUNTS if count
)


def run(
    scheduler: Scheduler, steps: int, *, untimed: bool = False, cells: Sequence[Cell] = CELLS
) -> list[tuple[WindowPlace | None, int]]:
    """Place and verified drafts of each step that only decodes, with an order from the start."""
    order = WindowOrder(tuple(cells), compared_pairs(cells), "0", untimed)
    CountSwitch(scheduler, COUNTS).interleave(order)
    outputs = [scheduler.schedule() for _ in range(steps)]
    return [
        (
            getattr(output, PLACE),
            max(map(len, output.scheduled_spec_decode_tokens.values()), default=0),
        )
        for output in outputs
        if only_verifies(output)
    ]


@pytest.mark.parametrize("untimed", [False, True])
def test_each_place_verifies_its_own_count(untimed: bool) -> None:
    decoded = run(Scheduler(), 200, untimed=untimed)
    assert len(decoded) == 199  # all but the prefill
    placed = [(place, drafts) for place, drafts in decoded if place is not None]
    assert len(placed) > 190
    counts = (*COUNTS, 0)  # the A/A arm is k = 0
    assert all(drafts == counts[place.cell] for place, drafts in placed)
    assert {place.cell for place, _ in placed} == set(range(len(CELLS)))


def test_the_last_window_of_a_staged_group_drafts_for_its_own_count() -> None:
    """It is compared, so its drafter's time must be that of its count: whatever comes next, the
    step behind it verifies as many drafts. Groups of other counts go on with the next group's."""
    cells = (*CELLS, *STAGED)
    decoded = run(Scheduler(), 900, cells=cells)
    groups: dict[int, set[int]] = {}
    for place, _ in decoded:
        if place is not None:
            groups.setdefault(place.group, set()).add(place.cell)
    staged = {group for group, own in groups.items() if max(own) >= len(CELLS)}
    assert len(staged) > 20
    follows: dict[bool, list[bool]] = {True: [], False: []}
    for (place, drafts), (_, then) in pairwise(decoded):
        if place is not None and place.is_last:
            follows[place.group in staged].append(then == drafts)
    assert all(follows[True])
    assert not all(follows[False])
    placed = [(place, drafts) for place, drafts in decoded if place is not None]
    assert all(drafts == (cells[place.cell].drafts or 0) for place, drafts in placed)


def test_groups_are_whole_but_where_a_prefill_cuts_them() -> None:
    """The group of step 60 is cut; every other one runs to its end, and none is joined."""
    placed = [place for place, _ in run(Scheduler((0, 60)), 300) if place is not None]
    groups = [list(own) for _, own in groupby(placed, key=lambda place: place.group)]
    cut = [own for own in groups if len(own) < RUNS * own[0].run_length]
    assert len(cut) == 2  # the last one too
    assert cut[0][0].position == cut[0][0].run == 0
    assert all(own[0].position == own[0].run == 0 for own in groups)


def test_a_fixed_count_marks_steps_that_only_decode() -> None:
    scheduler = Scheduler()
    counts = CountSwitch(scheduler, COUNTS)
    counts.fix(2)
    outputs = [scheduler.schedule() for _ in range(4)]
    assert [only_verifies(output) for output in outputs] == [False, True, True, True]
    assert [getattr(output, PLACE, None) for output in outputs] == [None] * 4
    assert scheduler.dynamic_sd_lookup == [2] * 9


def test_a_scheduler_without_a_lookup_is_refused() -> None:
    with pytest.raises(EngineError, match="num_speculative_tokens_per_batch_size"):
        CountSwitch(SimpleNamespace(dynamic_sd_lookup=None, schedule=None), COUNTS)


def test_counts_that_the_lookup_does_not_name_are_refused() -> None:
    """vLLM captured no graph for them."""
    scheduler = SimpleNamespace(dynamic_sd_lookup=[0, 0, 1, 2], schedule=None)
    with pytest.raises(EngineError, match=r"max_num_seqs is 3.*there are 4"):
        CountSwitch(scheduler, COUNTS)


@pytest.mark.slow
def test_vllm_reads_a_schedule_that_names_every_count() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert set(build_dynamic_sd_schedule_lookup(schedule_of(COUNTS), 8, 4)[1:]) == set(COUNTS)
    assert build_dynamic_sd_schedule_lookup(schedule_of(COUNTS), 3, 4)[1:] == [0, 1, 2]
