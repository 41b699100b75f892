"""Rings of records without an engine: whose ring is whose, what stock finds, and refusals."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused
from test_state_slots import (
    BESIDE,
    OneSlot,
    as_committed,
)
from test_state_slots import hook as hook  # a fixture
from test_state_slots import net as net  # a fixture
from test_window_states import COUNTS, check_committed
from v2_pieces import run_step

from nwor_bench.errors import EngineError
from nwor_bench.plugin.one_slot_states import ONE_SLOT
from nwor_bench.plugin.state_rings import RINGS, StateRings
from nwor_kernels.limits import RECORD_ROWS

pytestmark = pytest.mark.slow  # vLLM's recurrent layers are imported


def scheduled(**named: Any) -> Any:
    """A SchedulerOutput of requests that end, start or go on."""
    new = [SimpleNamespace(req_id=each) for each in named.get("new", ())]
    return SimpleNamespace(
        finished_req_ids=named.get("finished", set()), preempted_req_ids=named.get("preempted"),
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=named.get("resumed", set())),
    )  # fmt: skip


@pytest.fixture
def rings() -> StateRings:
    """Three rings; "a" and "b" have one."""
    made = StateRings(3, 5, torch.device("cpu"))
    made.records.cursors[1:] = 7
    made.place(["a", "b"])
    return made


def test_a_request_keeps_its_ring_wherever_its_row_is(rings: StateRings) -> None:
    of_row, cursors = rings.records.of_row, rings.records.cursors
    first, second = of_row.tolist()[:2]
    assert len({0, first, second}) == 3
    assert of_row[2] == 0
    assert cursors[[first, second], 0].tolist() == [0, 0]
    cursors[first, 0] = 4
    rings.place(["b", "c", "a"])
    assert of_row.tolist()[0::2] == [second, first]
    assert cursors[of_row.long(), 0].tolist() == [0, 0, 4]
    with refused(RINGS, EngineError, value=1):
        rings.place(["a", "b", "c", "d"])


@pytest.mark.parametrize("how", ["finished", "preempted", "resumed", "new"])
def test_a_ring_is_given_back_and_empty_again(rings: StateRings, how: str) -> None:
    rings.records.cursors[:, 0] = 4
    rings.scheduled(scheduled(**{how: {"a"}}))
    rings.place(["a", "b"])
    assert rings.records.cursors[rings.records.of_row[:2].long(), 0].tolist() == [0, 4]
    rings.scheduled(scheduled(finished={"a", "b", "unknown"}))
    rings.place(["c", "d", "e"])
    assert len(set(rings.records.of_row.tolist())) == 3


def test_rows_are_copied_if_the_batch_changes(rings: StateRings) -> None:
    of_row = rings.records.of_row
    placed = of_row.tolist()
    of_row.zero_()
    rings.place(["a", "b"])
    assert not of_row.any()
    rings.only(torch.tensor([False, True]))
    assert of_row.tolist() == [placed[1], 0, 0]
    rings.place(["a", "b"])
    assert of_row.tolist() == placed


def test_stock_reads_rows_without_drafts_that_had_some(rings: StateRings) -> None:
    rings.place(["a", "b", "c"])
    assert not rings.stock_reads({"a": [1], "b": [1]})  # c: a prefill
    rings.place(["a", "c"])
    assert not rings.stock_reads({"a": [1]})
    rings.place(["a", "c"])
    assert rings.stock_reads({"c": [1], "a": []})  # c drafts beside a, which does not
    assert not rings.in_use  # all that are in the step were made current
    assert not rings.stock_reads({"c": [1]})
    rings.place(["b", "c"])
    assert rings.stock_reads({"c": [1]})  # b was not there when the others were made current
    rings.scheduled(scheduled(finished={"c"}))
    rings.place(["b"])
    assert not rings.stock_reads({})


def test_the_debug_check_of_requests_that_were_not_made_current(rings: StateRings) -> None:
    rings.check(["a", "b"], torch.tensor([10, 10]))
    rings.records.cursors[rings.records.of_row[:2].long(), 0] = 2
    rings.place(["a"])
    rings.empty()
    rings.place(["b"])
    rings.check(["b"], torch.tensor([12]))


@pytest.mark.parametrize(
    ("rows", "tokens", "sound"),
    [(2, 12, True), (3, 12, False), (1, 12, False), (0, 12, False), (0, 22, True), (3, 22, False)],
)
def test_the_debug_check(rings: StateRings, rows: int, tokens: int, sound: bool) -> None:
    """At 10 tokens no row was live."""
    rings.check(["a"], torch.tensor([10]))
    rings.records.cursors[rings.records.of_row[0].long(), 0] = rows
    if sound:
        rings.check(["a"], torch.tensor([tokens]))
        return
    with refused(RINGS, EngineError, value=rows):
        rings.check(["a"], torch.tensor([tokens]))


@pytest.mark.parametrize("beside", [False, True], ids=["windows alone", "beside a prefill"])
def test_committed_tokens_are_in_the_ring_until_stock_reads(beside: bool) -> None:
    pieces = OneSlot()
    pieces.step |= BESIDE if beside else {}
    before = [layer.state.clone() for layer in pieces.layers]
    pieces.rings.place(["a", "new", "b"] if beside else ["a", "b"])
    pieces.verify(0, 1, 2)
    live = pieces.rings.records.of_row[:2].clone()
    stock = as_committed(OneSlot())  # the same draws
    counts = torch.tensor([3, 2, 1], dtype=torch.int32) if beside else COUNTS
    assert pieces.states.commit(counts) == (3, None)
    assert pieces.states.rows == (2 if beside else None)
    for number, (layer, old) in enumerate(zip(pieces.layers, before, strict=True)):
        assert torch.equal(layer.state, old)
        slots = pieces.indices[layer.group][:, 0].long()
        found = pieces.states.current(number, slots, live)
        torch.testing.assert_close(found, stock[number][slots], rtol=1e-5, atol=1e-6)
    assert pieces.rings.records.cursors[live.long(), 0].tolist() == COUNTS.tolist()
    for layer in pieces.layers:
        object.__setattr__(layer, "cache_group", layer.group)
    pieces.rings.place(["a", "b"])
    pieces.states.make_current(2, [table[:, :1] for table in pieces.indices])
    check_committed(pieces, before, stock)
    assert not pieces.rings.records.cursors[:, 0].any()


def test_stock_never_reads_a_state_behind_live_rows() -> None:
    pieces = OneSlot()
    without = pieces.metadata(0, num_spec_decode_tokens=2)
    assert not pieces.states.stages(without)  # a dummy run
    pieces.rings.place(["a", "b"])
    assert not pieces.rings.stock_reads({"a": [1], "b": [1]})
    with refused(ONE_SLOT, EngineError):
        pieces.states.stages(without)
    assert pieces.rings.stock_reads({})
    for layer in pieces.layers:
        object.__setattr__(layer, "cache_group", layer.group)
    pieces.states.make_current(2, [table[:, :1] for table in pieces.indices])
    assert not pieces.states.stages(without)
    assert not pieces.rings.stock_reads({"a": [1], "b": [1]})
    pieces.verify(0, 1, 2)
    pieces.states.commit(COUNTS)
    assert not pieces.states.stages(without)


def test_records_have_a_row_for_each_of_a_rings() -> None:
    states = OneSlot().states
    assert states.record_bytes == states.token_bytes * 4 * RECORD_ROWS


def test_a_step_places_rings_and_without_drafts_makes_states_current(hook: Any) -> None:
    calls: list[tuple[str, int]] = []
    hook.states.rings = SimpleNamespace(
        scheduled=lambda step: calls.append(("scheduled", 0)),
        place=lambda req_ids: calls.append(("place", len(req_ids))),
        stock_reads=lambda drafts: not drafts,
    )
    hook.states.make_current = lambda rows, tables: calls.append(("make_current", rows))
    more = {"preempted_req_ids": None}
    run_step(hook, ["a", "b"], set(), **more)
    assert calls == [("scheduled", 0), ("place", 2)]
    run_step(hook, ["a", "b"], set(), drafts=0, **more)
    assert calls[2:] == [("scheduled", 0), ("place", 2), ("make_current", 2)]
