"""The V2 runner's input batch as a window: rows staged, whose they are, what is written."""

from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from nwor_bench.plugin.runner_v2 import plan as gpu_plan
from nwor_bench.plugin.runner_v2.plan import (
    StepDrafts,
    WindowPlanner,
    drafts_only,
    equal_drafts,
    may_read_this_step,
    set_slots,
    whole_step,
)
from nwor_kernels.commit.plan import StagedSources

CPU = torch.device("cpu")

requests = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda n: (n[0], min(n[1], n[0] - 1))),
    min_size=1,
    max_size=6,
).filter(lambda batch: any(drafts for _, drafts in batch))
"""(rows of the step, how many of them are drafts) of each request."""


def step_drafts(drafts, tokens):
    return StepDrafts(np.array(drafts, dtype=np.int32), tokens)


def starts_of(rows):
    return np.cumsum([0, *rows]).astype(np.int32)


def whole(requests, length, slots):
    counts = step_drafts([length - 1] * requests, requests * length)
    return whole_step(counts, length, torch.arange(requests * length), slots)


@given(batch=requests, copied=st.booleans())
def test_every_draft_is_staged_once_and_nothing_else(batch, copied):
    rows, own = zip(*batch, strict=True)
    starts, slots = starts_of(rows), torch.randperm(1000)[: sum(rows)]
    window = drafts_only(step_drafts(own, sum(rows)), starts, slots, copied=copied)
    expected = [
        (request, index, int(starts[request + 1]) - drafts + index)
        for request, (_, drafts) in enumerate(batch)
        for index in range(drafts)
    ]
    found = zip(
        window.row_request.tolist(), window.row_index.tolist(), window.rows.tolist(), strict=True
    )
    assert list(found) == expected
    assert window.slots.tolist() == [int(slots[row]) for _, _, row in expected]
    staged = {row for _, _, row in expected}
    direct = [-1 if row in staged else int(slots[row]) for row in range(len(slots))]
    assert window.direct_slots.tolist() == direct
    assert window.total == len(expected)


@pytest.mark.parametrize(
    ("drafts", "tokens", "length"),
    [
        ([4, 4, 4], 15, 5),
        ([1], 2, 2),
        ([4, 4, 3], 14, None),  # a shorter window
        ([4, 4, 4], 20, None),  # a prefill chunk of five more tokens somewhere
        ([0, 0], 2, None),  # no drafts at all
    ],
)
def test_a_step_is_uniform_only_if_it_is_nothing_but_equal_windows(drafts, tokens, length):
    assert step_drafts(drafts, tokens).uniform_length() == length


def test_a_whole_step_waits_for_the_commit_entirely():
    window = whole(2, 3, torch.tensor([7, 8, 9, 3, 4, 5]))
    assert window.direct_slots is None
    assert window.staged_start is None
    assert (window.tokens_per_request, window.max_query_len, window.total) == (3, 3, 4)
    assert window.commit_shape == ("commit", 6, 3, None)
    assert window.fits(torch.zeros(2, dtype=torch.int32))
    assert not window.fits(torch.zeros(1, dtype=torch.int32))
    assert not window.fits(torch.zeros(2, 3, dtype=torch.int32))


def equal_to_drafts_only(window, requests, length, slots):
    """Does the plan stage and write what a plan made only for this step would?"""
    counts = step_drafts([length - 1] * requests, requests * length)
    wanted = drafts_only(counts, starts_of([length] * requests), slots, copied=True)
    for name in ("rows", "slots", "direct_slots", "staged_start", "staged_end"):
        found, expected = getattr(window, name), getattr(wanted, name)
        assert found.dtype is expected.dtype
        assert found.tolist() == expected.tolist()
    assert window.num_draft_tokens == wanted.num_draft_tokens
    assert (window.max_query_len, window.certain, window.copied) == (length, 0, True)
    assert (window.total, window.tokens_per_request) == (wanted.total, length - 1)


@given(
    requests=st.integers(1, 5),
    length=st.integers(2, 6),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3),
)
def test_equal_windows_by_copy_write_first_tokens_and_stage_the_rest(requests, length, seeds):
    window = equal_drafts(requests, length, CPU)
    # So that a capture on such a window writes nothing.
    assert set(window.slots.tolist()) == set(window.direct_slots.tolist()) == {-1}
    tokens = requests * length
    before = [window.rows, window.slots, window.direct_slots, window.staged_start]
    for seed in seeds:  # the same tensors serve step after step
        slots = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:tokens]
        set_slots(window, torch.cat([slots, torch.tensor([-1, -1])]))  # padded by vLLM
        equal_to_drafts_only(window, requests, length, slots)
    after = [window.rows, window.slots, window.direct_slots, window.staged_start]
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in before]


@dataclass
class Graphs:
    """A stand-in for the captured shapes."""

    shapes: dict = field(default_factory=dict)
    unavailable: str | None = None
    direct: str | None = None

    def why_direct(self, descriptor, input_batch):
        return self.direct


class Mode(Enum):
    """vLLM's CUDAGraphMode; the planner reads its name."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


@dataclass(frozen=True)
class Descriptor:
    """What vLLM's dispatch says of a full graph."""

    num_tokens: int
    uniform_token_count: int = 3
    num_active_loras: int = 0
    cg_mode: Mode = Mode.FULL


def input_batch(drafts, rows=None):
    """vLLM's batch; without `rows` each request has its drafts and one token more."""
    rows = rows or [n + 1 for n in drafts]
    return SimpleNamespace(
        num_reqs=len(drafts), num_tokens=sum(rows), num_draft_tokens=sum(drafts),
        num_draft_tokens_per_req=np.array(drafts, dtype=np.int32),
        query_start_loc_np=starts_of(rows),
    )  # fmt: skip


def planner(graphs=None, copied=True, **more):
    return WindowPlanner(3, 1, 8, graphs or Graphs(), CPU, copied, **more)


def captured_window(requests, length, copied=True, sources="the capture's"):
    made = equal_drafts(requests, length, CPU)
    if not copied:
        made = whole(requests, length, torch.full((requests * length,), -1))
    return replace(made, sources=sources)


def slot_mappings(tokens, padded=0, seed=0):
    """[groups, tokens + padded]: the target's group is number 1, others are never read."""
    slots = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:tokens]
    own = torch.cat([slots, torch.full((padded,), -1)])
    return torch.stack([torch.full_like(own, -99), own])


def test_an_eager_step_of_equal_windows_is_copied_without_its_first_tokens():
    made = planner()
    for seed in (1, 2):
        mappings = slot_mappings(6, seed=seed)
        window, reason = made.plan(input_batch([2, 2]), mappings, None)
        assert reason is None
        equal_to_drafts_only(window, 2, 3, mappings[1])
        assert window.sources is None
    shorter, _ = made.plan(input_batch([1, 1]), slot_mappings(4), None)
    equal_to_drafts_only(shorter, 2, 2, slot_mappings(4)[1])


@pytest.mark.parametrize("copied", [False, True])
def test_a_replay_of_fewer_requests_than_were_captured(copied):
    captured = captured_window(4, 3, copied)
    made = planner(Graphs({Descriptor(12): captured}), copied)
    buffer = slot_mappings(9, padded=3)
    seen = []
    for seed in (3, 4):
        buffer.copy_(slot_mappings(9, padded=3, seed=seed))
        window, reason = made.plan(input_batch([2] * 3), buffer, Descriptor(12))
        assert reason is None
        assert (window.sources, window.total) == ("the capture's", 6)
        real, padding = buffer[1, :9].view(3, 3), [-1] * 3
        if copied:
            assert window.slots.tolist() == real[:, 1:].flatten().tolist() + padding[1:]
            direct = window.direct_slots.view(4, 3)
            assert direct[:, 0].tolist() == [*real[:, 0].tolist(), -1]
            assert direct[:, 1:].eq(-1).all()
        else:
            assert window.slots.data_ptr() == buffer[1].data_ptr()
            assert window.slots.tolist() == buffer[1].tolist()
        seen.append(window)
    assert seen[0] is seen[1]  # nothing is planned twice
    if copied:  # and the captured kernels see what is filled in
        assert window.slots.data_ptr() == captured.slots.data_ptr()
        assert window.direct_slots.data_ptr() == captured.direct_slots.data_ptr()


MEMORY = "graph_capture:OutOfMemoryError"
PIECEWISE, EAGER = Descriptor(8, cg_mode=Mode.PIECEWISE), Descriptor(8, cg_mode=Mode.NONE)


@pytest.mark.parametrize(
    ("made", "batch", "descriptor", "reason"),
    [
        # Breakable graphs hold the write; eager steps of the same engine are staged.
        (planner(breakable=True), input_batch([2, 0], [3, 5]), PIECEWISE, "breakable_cuda_graphs"),
        (planner(breakable=True), input_batch([2, 0], [3, 5]), EAGER, None),
        (planner(breakable=True), input_batch([2, 0], [3, 5]), None, None),
        (planner(breakable=True), input_batch([2]), Descriptor(3), "full_graph_of_another_shape"),
        (planner(Graphs(unavailable=MEMORY)), input_batch([2]), Descriptor(3), MEMORY),
        (
            planner(Graphs(unavailable=MEMORY)), input_batch([2, 1], [3, 3]), Descriptor(6),
            "full_graph_with_uneven_windows",
        ),
    ],
)  # fmt: skip
def test_what_a_graph_cannot_run_is_written_directly(made, batch, descriptor, reason):
    window, found = made.plan(batch, slot_mappings(batch.num_tokens), descriptor)
    assert found == reason
    assert window is None if reason else window.total == batch.num_draft_tokens


def test_each_length_and_number_of_adapters_replays_its_own_capture():
    """Six rows are two windows of three or three of two, with an adapter and without."""
    shapes = {}
    for length in (2, 3):
        for loras in (0, 2):
            window = captured_window(6 // length, length, sources=f"{length} {loras}")
            shapes[Descriptor(6, length, loras)] = window
    made = planner(Graphs(shapes))
    for _ in range(2):  # planned, then kept
        for descriptor, captured in shapes.items():
            length = descriptor.uniform_token_count
            requests = 6 // length
            batch = input_batch([length - 1] * requests)
            window, reason = made.plan(batch, slot_mappings(6), descriptor)
            assert (window.sources, window.total, reason) == (captured.sources, 6 - requests, None)
    for length in (1, 4):  # no drafts, and more than the engine's most
        planned = made.plan(input_batch([2, 2]), slot_mappings(6), Descriptor(6, length))
        assert planned == (None, "full_graph_of_another_shape")


def certain_slots(window, mappings, rows=3):
    """Slots of each request's certain token that are written at once, before attention reads."""
    if window.direct_slots is None:
        return []
    direct = window.direct_slots.tolist()
    return [slot for slot in mappings[1].tolist()[::rows] if slot in direct]


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE"])
def test_certain_tokens_are_written_at_once_for_a_request_that_reads_them(copied, mode):
    """A new request may hit the block that another one's certain token completes in this step."""
    descriptor = None if mode is None else SimpleNamespace(cg_mode=SimpleNamespace(name=mode))
    mappings = slot_mappings(6)
    window, reason = planner(copied=copied).plan(
        input_batch([2, 2]), mappings, descriptor, certain_at_once=True
    )
    assert reason is None
    assert certain_slots(window, mappings) == mappings[1].tolist()[::3]
    assert (window.total, window.certain) == (4, 0)
    assert sorted(window.slots.tolist()) == sorted(mappings[1].view(2, 3)[:, 1:].flatten().tolist())


def test_a_graph_that_captured_whole_steps_does_not_replay_such_a_step():
    made = planner(Graphs({Descriptor(6): captured_window(2, 3, copied=False)}), copied=False)
    batch, mappings = input_batch([2, 2]), slot_mappings(6)
    planned = made.plan(batch, mappings, Descriptor(6), certain_at_once=True)
    assert planned == (None, "prefix_hit_in_full_graph")
    window, reason = made.plan(batch, mappings, Descriptor(6))
    assert (window.certain, reason) == (1, None)  # the next step is staged again


@pytest.mark.parametrize(
    ("most", "drafts", "rows", "copied"),
    [
        (None, [2, 2], None, False),
        (None, [2, 1, 0], None, False),  # a request with only its certain token is no prefill
        (6, [2, 2], None, False),
        (6, [2, 1, 0], None, False),
        # Of more rows every layer's K/V would stay alive until the next window.
        (5, [2, 2], None, True),
        (5, [2, 1, 0], None, True),
        (None, [2, 0], [3, 5], True),
    ],
)
def test_a_prefill_or_more_rows_than_may_stay_alive_are_copied(most, drafts, rows, copied):
    batch = input_batch(drafts, rows)
    made = planner(copied=False, most_referenced=most)
    window, reason = made.plan(batch, slot_mappings(batch.num_tokens), None)
    assert reason is None
    assert (window.copied, window.total) == (copied, sum(drafts))


def test_plans_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(gpu_plan, "MAX_PLANS", 3)
    made = planner(Graphs({Descriptor(24): captured_window(8, 3)}))
    first = None
    for requests in [*range(1, 9), 1]:
        batch, mappings = input_batch([2] * requests), slot_mappings(24)
        eager, _ = made.plan(batch, mappings, None)
        equal_to_drafts_only(eager, requests, 3, mappings[1, : 3 * requests])
        made.plan(batch, mappings, Descriptor(24))
        first = first or ref(eager)
        assert len(made._copies) <= 3
        assert len(made._replays) <= 3
    del eager
    assert first() is None


def test_captured_windows_of_one_size_are_different_launches():
    """Graphs with and without a LoRA adapter hold their K/V at different addresses."""
    window = whole(2, 3, torch.arange(6))
    rows = torch.randn(2, 6, 1, 8)
    captured = [replace(window, sources=(StagedSources([k], [k]),)) for k in rows]
    assert captured[0].commit_shape != captured[1].commit_shape
    assert captured[0].commit_shape == replace(captured[0], slots=-window.slots).commit_shape


@pytest.mark.parametrize(
    ("computed", "resumed", "reads"),
    [
        ([], [], False),
        ([0], [], False),  # nothing cached: it reads only its own tokens
        ([32], [], True),
        ([0, 32], [], True),
        ([], ["a-1"], True),
    ],
)
def test_only_a_request_that_starts_on_cached_tokens_reads_what_others_write(
    computed, resumed, reads
):
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=n) for n in computed],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )
    assert may_read_this_step(step) is reads
