"""Draft counts set ahead of the step that verifies them: in a batch, and in a server's traffic."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.errors import EngineError
from nwor_bench.instruments.draft_counts import (
    PATIENCE,
    SPAN,
    CountSwitch,
    schedule_of,
    server_counts,
    verifies,
)
from nwor_bench.records.cell import AA, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.types import SETTLING
from nwor_bench.records.window_order import (
    PLACE,
    RUNS_OF_GROUP,
    WindowOrder,
    WindowPlace,
    compared_pairs,
    only_verifies,
)

COUNTS = (0, 1, 2, 4)
MAX_COUNT = 3
"""Largest draft count of a server."""
CELLS = tuple(Cell("tiny", NworMode.OFF, ScvMode.OFF, arm) for arm in (*map(Drafts, COUNTS), AA))
STAGED = tuple(
    Cell("tiny", NworMode.STAGE, ScvMode.ADAPTIVE, Drafts(count)) for count in COUNTS if count
)


class Scheduler:
    """Verifies what the step before drafted: the lookup's value while that step was scheduled.

    Each step is of `running` requests that decode, and `new` ones that begin with a prompt; 0 and 0
    is the empty step behind the last request. With -1 new ones a request has a draft less, as one
    that comes to its last tokens.
    """

    def __init__(self, counts: Sequence[int] = COUNTS) -> None:
        self.dynamic_sd_lookup = [0, *counts, *[max(counts)] * 12]
        self.drafting: list[int] = []
        """Drafts that each step proposes."""
        self._drafted: dict[str, int] = {}
        self._named = 0

    def step(self, running: int, new: int = 0) -> Any:
        self._wanted = (running, new)
        return self.schedule()

    def schedule(self) -> Any:
        running, new = self._wanted
        known = list(self._drafted)[:running]
        begun = [f"r{self._named + number}" for number in range(new)]
        self._named += len(begun)
        drafts = {name: [-1] * n for name in known if (n := self._drafted[name])}
        if drafts and new < 0:
            drafts[known[0]].pop()
        tokens = {name: 1 + len(drafts.get(name, ())) for name in known} | dict.fromkeys(begun, 50)
        k = self.dynamic_sd_lookup[max(len(tokens), 1)]
        assert set(self.dynamic_sd_lookup) == {k}
        if tokens:
            self.drafting.append(k)
            self._drafted = dict.fromkeys(tokens, k)
        return SimpleNamespace(
            scheduled_new_reqs=begun,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
        )


# In a batch.


def run(
    steps: int, untimed: bool = False, cells: Any = CELLS
) -> list[tuple[WindowPlace | None, int]]:
    """Place and verified drafts of each step that only decodes, of one batch of three requests."""
    scheduler = Scheduler()
    order = WindowOrder(tuple(cells), compared_pairs(cells), "0", untimed)
    CountSwitch(scheduler, COUNTS).interleave(order)
    outputs = [scheduler.step(0, 3)]
    outputs += [scheduler.step(3) for _ in range(1, steps)]
    decoded = [output for output in outputs if only_verifies(output)]
    return [(getattr(output, PLACE), verifies(output) or 0) for output in decoded]


def placed(decoded: Any) -> list[tuple[WindowPlace, int]]:
    return [(place, drafts) for place, drafts in decoded if place is not None]


def places(outputs: Sequence[Any]) -> list[WindowPlace]:
    return [place for each in outputs if (place := getattr(each, PLACE)) is not None]


@pytest.mark.parametrize("untimed", [False, True])
def test_each_place_verifies_its_own_count(untimed: bool) -> None:
    decoded = run(200, untimed=untimed)
    assert len(decoded) == 199  # all but the prefill
    found = placed(decoded)
    assert len(found) > 190
    counts = (*COUNTS, 0)  # the A/A arm is k = 0
    assert all(drafts == counts[place.cell] for place, drafts in found)
    assert {place.cell for place, _ in found} == set(range(len(CELLS)))


def test_the_last_window_of_a_staged_group_drafts_for_its_own_count() -> None:
    """A window that is compared needs its own count's drafter time: whatever comes next, the
    step behind it verifies as many drafts. Groups of other counts go on with the next group's."""
    cells = (*CELLS, *STAGED)
    decoded = run(900, cells=cells)
    groups: dict[int, set[int]] = {}
    for place, _ in placed(decoded):
        groups.setdefault(place.group, set()).add(place.cell)
    staged = {group for group, own in groups.items() if max(own) >= len(CELLS)}
    assert len(staged) > 20
    follows: dict[bool, list[bool]] = {True: [], False: []}
    for (place, drafts), (_, then) in pairwise(decoded):
        if place is not None and place.is_last:
            follows[place.group in staged].append(then == drafts)
    assert all(follows[True])
    assert not all(follows[False])
    assert all(drafts == (cells[place.cell].drafts or 0) for place, drafts in placed(decoded))


def test_a_fixed_count_has_no_places_and_its_steps_are_windows() -> None:
    scheduler = Scheduler()
    CountSwitch(scheduler, COUNTS).fix(2)
    outputs = [scheduler.step(0, 3), *(scheduler.step(3) for _ in range(3))]
    assert [only_verifies(output) for output in outputs] == [False, True, True, True]
    assert places(outputs) == []
    assert set(scheduler.dynamic_sd_lookup) == {2}


@pytest.mark.parametrize(
    ("lookup", "words"),
    [
        (None, "num_speculative_tokens_per_batch_size"),
        ([0, 0, 1, 2], r"max_num_seqs is 3.*there are 4"),  # vLLM captured no graph for the last
    ],
)
def test_a_scheduler_that_cannot_change_its_count_is_refused(
    lookup: list[int] | None, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        CountSwitch(SimpleNamespace(dynamic_sd_lookup=lookup, schedule=None), COUNTS)


@pytest.mark.slow
def test_vllm_reads_a_schedule_that_names_every_count() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    assert set(build_dynamic_sd_schedule_lookup(schedule_of(COUNTS), 8, 4)[1:]) == set(COUNTS)
    assert build_dynamic_sd_schedule_lookup(schedule_of(COUNTS), 3, 4)[1:] == [0, 1, 2]


# In a server.

Traffic = Sequence[tuple[int, int]]
"""Running and new requests of each step."""

steady = st.integers(1, 60).map(lambda steps: [(8, 0)] * steps)
busy = st.integers(1, 60).map(lambda steps: [(8, 1)] * steps)
uneven = st.integers(1, 60).map(lambda steps: [(8, -(at % 7 == 0)) for at in range(steps)])
other = st.sampled_from([[(8, 2)], [(0, 0)], [(0, 3)], [(1, 0)], [(2, -1)]])
traffics = (
    st.lists(st.one_of(steady, busy, uneven, other), max_size=12).map(chain.from_iterable).map(list)
)


def serve(traffic: Traffic) -> tuple[list[int], list[Any]]:
    """Drafts that each step proposes, and the steps."""
    scheduler = Scheduler(range(MAX_COUNT + 1))
    CountSwitch(scheduler, range(MAX_COUNT + 1)).interleave_for_good(MAX_COUNT)
    outputs = [scheduler.step(0, 2), *(scheduler.step(*each) for each in traffic)]
    return scheduler.drafting, [output for output in outputs if output.num_scheduled_tokens]


@examples(300)
@given(traffics)
def test_under_any_traffic_places_are_true_groups_whole_or_cut_and_no_count_stays(
    traffic: Traffic,
) -> None:
    """The last window of a run drafts for the next one, and is not used. Where each step has a
    prefill a span follows a span, after the wait for a group."""
    drafting, outputs = serve(traffic)
    for at, (output, drafts) in enumerate(zip(outputs, drafting, strict=True)):
        place = getattr(output, PLACE)
        if place is not None:
            assert all(map(only_verifies, outputs[at - SETTLING : at]))
            assert verifies(output) == server_counts(MAX_COUNT)[place.cell]
            assert place.position == place.run_length - 1 or drafts == verifies(output)
        if output.scheduled_new_reqs:
            assert place is None
            assert not only_verifies(output)
    found = [(at, place) for at, each in enumerate(outputs) if (place := getattr(each, PLACE))]
    for _, group in groupby(found, key=lambda each: each[1].group):
        steps, own = zip(*group, strict=True)
        assert [3 * p.run + p.position for p in own] == list(range(len(own)))
        assert all(after == before + 1 for before, after in pairwise(steps))
    longest = max(len(list(run)) for _, run in groupby(drafting))
    assert longest <= 2 * (SPAN + PATIENCE)


def test_all_counts_take_turns_and_k_0_is_rare() -> None:
    drafting, outputs = serve([(8, 0)] * 6400)
    groups = Counter(
        max(place.cell for place in own)
        for _, group in groupby(places(outputs), key=lambda place: place.group)
        if len(own := list(group)) == RUNS_OF_GROUP * 3
    )
    assert set(groups) == {1, 2, 3, MAX_COUNT + 1}  # the last is k = 0 against itself
    assert max(groups.values()) - min(groups.values()) <= 1
    shares = {k: n / 6400 for k, n in Counter(drafting).items()}
    assert 0.1 < shares[0] < 0.2
    assert all(0.25 < shares[k] < 0.32 for k in (1, 2, 3))


def test_with_a_prefill_in_each_step_only_spans_are_left() -> None:
    drafting, outputs = serve([(8, 1)] * 3 * (SPAN + PATIENCE))
    assert places(outputs) == []
    spans = [(k, len(list(own))) for k, own in groupby(drafting)]
    assert {1, 2, 3} <= {k for k, steps in spans if steps >= SPAN}
