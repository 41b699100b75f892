"""Windows of an interleaved batch: every group is balanced, every pair has its share."""

from collections import Counter, defaultdict
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.records.cell import Drafts
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode
from nwor_bench.records.window_order import (
    DRAFT_RUN_LENGTHS,
    PLACE,
    RUN_LENGTHS,
    RUNS_OF_GROUP,
    SERVER_DRAFT_RUN_LENGTHS,
    WindowOrder,
    WindowPlace,
    compared,
    compared_pairs,
    only_verifies,
    places_of,
)
from nwor_bench.stats.robust import MIN_APART

SEEDS = st.text(max_size=8)
PAIRS = st.integers(1, 6).map(lambda n: [(0, other) for other in range(1, n + 1)])


def groups_of(
    pairs: list[tuple[int, int]], seed: str, windows: int
) -> dict[int, list[WindowPlace]]:
    groups = defaultdict(list)
    for place in islice(places_of(pairs, seed), windows):
        groups[place.group].append(place)
    groups.popitem()  # the last may be cut
    return groups


@given(PAIRS, SEEDS)
def test_a_group_is_four_runs_of_one_length_in_a_palindrome(pairs, seed):
    for own in groups_of(pairs, seed, 300).values():
        length = own[0].run_length
        assert length in RUN_LENGTHS
        assert [place.run for place in own] == [run for run in range(4) for _ in range(length)]
        assert [place.position for place in own] == 4 * list(range(length))
        cells = [place.cell for place in own[::length]]
        assert cells == cells[::-1]
        assert len(set(cells)) == 2
        assert tuple(sorted(set(cells))) in pairs


@given(PAIRS, SEEDS)
def test_every_pair_has_its_turn_in_each_round(pairs, seed):
    groups = list(groups_of(pairs, seed, 1000).values())
    assert groups == list(groups_of(pairs, seed, 1000).values())
    for start in range(0, len(groups) - len(pairs), len(pairs)):
        round_of = [{place.cell for place in own} for own in groups[start : start + len(pairs)]]
        assert sorted(map(sorted, round_of)) == sorted(map(list, pairs))


def lengths_by_pair(pairs, seed, groups):
    found = defaultdict(list)
    for own in islice(groups_of(pairs, seed, 4 * 8 * groups).values(), groups):
        found[frozenset(place.cell for place in own)].append(own[0].run_length)
    return found


def test_a_hundred_groups_show_whether_a_switch_leaves_something_behind():
    """And take fewer than ten windows each. Who begins is drawn."""
    (lengths,) = lengths_by_pair([(0, 1)], "seed", 100).values()
    assert min(Counter(lengths).values()) >= MIN_APART
    assert RUNS_OF_GROUP * sum(lengths) < 1000
    assert len(lengths) == 100
    begins = Counter(own[0].cell for own in groups_of([(0, 1)], "a", 4000).values())
    assert min(begins.values()) > 0.4 * sum(begins.values())


@given(PAIRS, SEEDS)
def test_each_pairs_few_groups_have_their_share_of_long_runs(pairs, seed):
    for lengths in lengths_by_pair(pairs, seed, 10 * len(pairs)).values():
        assert Counter(lengths) == {2: 8, 4: 2}


def test_runs_of_draft_counts_have_windows_between_their_ends():
    cells = tuple(Cell("p", NworMode.OFF, ScvMode.OFF, arm) for arm in (Drafts(0), Drafts(1), AA))
    windows = list(islice(WindowOrder(cells, compared_pairs(cells), "seed").places(), 400))
    assert {place.run_length for place in windows} == set(DRAFT_RUN_LENGTHS)
    for length in (*DRAFT_RUN_LENGTHS, *SERVER_DRAFT_RUN_LENGTHS):
        own = list(compared(length, counts=True))
        assert own == list(range(length))[1:-1] != []
    assert list(compared(2, counts=True)) == [0]  # as older runs were compared
    assert [list(compared(length, counts=False)) for length in (2, 4)] == [[1], [1, 2, 3]]


def test_runs_of_a_batch_that_is_not_timed_are_of_one_window():
    order = WindowOrder(CELLS, compared_pairs(CELLS), "seed", untimed=True)
    windows = list(islice(order.places(), RUNS_OF_GROUP * len(order.pairs)))
    assert {place.cell for place in windows} == set(range(len(CELLS)))
    assert {place.run_length for place in windows} == {1}


CELLS = (
    Cell("p", NworMode.OFF, ScvMode.OFF),
    Cell("p", NworMode.OFF, ScvMode.GRAPH),
    Cell("p", NworMode.STAGE, ScvMode.OFF),
    Cell("p", NworMode.STAGE, ScvMode.GRAPH),
    Cell("p", NworMode.CONTROL, ScvMode.OFF),
    Cell("p", NworMode.OFF, ScvMode.OFF, AA),
)


@pytest.mark.parametrize(
    ("cells", "extra"),
    [
        (CELLS, [(4, 3)]),
        (tuple(c for c in CELLS if c.scv_mode is ScvMode.OFF), [(2, 1)]),
        (tuple(c for c in CELLS if c.nwor_mode is not NworMode.CONTROL), []),
        (tuple(c for c in CELLS if c.nwor_mode is not NworMode.STAGE), []),
    ],
)
def test_off_is_compared_with_all_and_the_control_with_what_stages(cells, extra):
    expected = [(0, n) for n in range(1, len(cells))] + extra
    assert list(compared_pairs(cells)) == expected


def test_a_staged_draft_count_is_compared_with_the_same_count_in_mode_off():
    zero, two, four = (Cell("p", NworMode.OFF, ScvMode.OFF, Drafts(k)) for k in (0, 2, 4))
    staged = [Cell("p", NworMode.STAGE, ScvMode.ADAPTIVE, Drafts(k)) for k in (2, 4)]
    again = Cell("p", NworMode.OFF, ScvMode.OFF, AA)
    cells = (zero, two, staged[0], four, staged[1], again)
    assert compared_pairs(cells) == ((0, 1), (1, 2), (0, 3), (3, 4), (0, 5))
    assert compared_pairs((zero, staged[1])) == ((0, 1),)  # in the gate, if k = 4 ran already
    assert WindowOrder(cells, (), "seed").drafts == (0, 2, 2, 4, 4, 0)
    assert WindowOrder(CELLS, (), "seed").drafts is None


@pytest.mark.parametrize(
    ("drafts", "tokens", "changed", "is_windows"),
    [
        ({"a": 2, "b": 1}, 5, {}, True),
        ({"a": 2}, 4, {}, True),
        ({"a": 2, "b": 1}, 6, {}, False),  # a prompt of two tokens beside them
        ({}, 2, {}, False),
        ({}, 2, {PLACE: None}, True),  # k = 0
        ({}, 2, {PLACE: None, "scheduled_new_reqs": ["b"]}, False),  # a prompt of one token
        ({}, 3, {PLACE: None}, False),
        ({}, 0, {PLACE: None, "num_scheduled_tokens": {}}, False),
    ],
)
def test_a_step_only_verifies_windows(drafts, tokens, changed, is_windows):
    values: dict[str, Any] = {
        "scheduled_spec_decode_tokens": {name: [-1] * n for name, n in drafts.items()},
        "num_scheduled_tokens": {"a": 1, "b": 1},
        "total_num_scheduled_tokens": tokens,
        "scheduled_new_reqs": [],
    }
    assert only_verifies(SimpleNamespace(**values | changed)) is is_windows
