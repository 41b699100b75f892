"""Windows staged by copy and by reference leave the same caches, those that acceptance asks for.

The plugin's own staging and plans over random K/V, for layers that are alike and for layers of two
cache shapes in three KV-cache groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, assert_same, generator, random_kv, to_device
from torch import Tensor

pytest.importorskip("triton")
from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.runner_v1.staging import write_kv_cache
from nwor_bench.plugin.runner_v2.plan import (
    GpuWindowBatch,
    StepDrafts,
    WindowPlanner,
    drafts_only,
    equal_drafts,
    set_slots,
    whole_step,
)
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import Window, close_leftover

Layers = Sequence[tuple[int, tuple[int, int], tuple[int, int]]]
"""Each layer's row of slots, (K/V heads, block size) and (K width, V width)."""

ALIKE: Layers = [(0, (2, 4), (16, 8))] * 2
MIXED: Layers = [
    (0, (2, 4), (16, 8)), (0, (1, 8), (32, 32)), (2, (2, 4), (16, 8)), (2, (1, 8), (32, 32)),
]  # fmt: skip
GROUPS = 3
"""Rows of slots if layers are mixed; the middle one is no target layer's and fits no cache."""

WAYS = ("whole step", "equal drafts", "drafts by reference", "drafts by copy")

Batch = Sequence[tuple[int, int]]
"""Rows and drafts of each request."""


@dataclass
class Step:
    """One step: its batch, slots, and K/V of each layer.

    `num_sampled` counts each request's certain token and its accepted drafts.
    """

    batch: Batch
    slots: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    num_sampled: Tensor

    @property
    def drafts(self) -> list[int]:
        return [drafts for _, drafts in self.batch]

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *(rows for rows, _ in self.batch)], dtype=np.int32)

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def counts(self) -> StepDrafts:
        return StepDrafts(np.array(self.drafts, dtype=np.int32), self.tokens)

    def accepted(self) -> Tensor:
        """[requests] int32, accepted drafts."""
        return (self.num_sampled - 1).clamp(min=0)

    def kept(self) -> list[int]:
        """All rows that belong in the cache after the step."""
        each = zip(self.batch, self.starts[1:], self.accepted().tolist(), strict=True)
        return [
            row for (rows, drafts), end, accepted in each
            for row in range(end - rows, end - drafts + accepted)
        ]  # fmt: skip

    def plan(self, way: str) -> GpuWindowBatch:
        if way.startswith("drafts"):
            return drafts_only(self.counts, self.starts, self.slots, copied=way.endswith("copy"))
        (length, _), rows = self.batch[0], torch.arange(self.slots.shape[-1])
        if way == "whole step":
            return whole_step(self.counts, length, rows.to(self.slots.device), self.slots)
        plan = equal_drafts(len(self.batch), length, self.slots.device, self.slots.shape[:-1])
        set_slots(plan, self.slots)
        return plan


def make_step(
    batch: Batch, seed: int, device: torch.device, padding: int = 0, *,
    layers: Layers = ALIKE, fused: Sequence[int] = (),
) -> Step:  # fmt: skip
    """Random slots and K/V; padding rows have slot -1 and NaN.

    K and V of the layers whose numbers are in `fused` are views of a QKV.
    """
    rng = generator(seed)
    tokens = sum(rows for rows, _ in batch)
    # As vLLM keeps them: rows of a wider buffer.
    slots = torch.full((GROUPS if layers is MIXED else 1, tokens + padding + 5), -1)
    for number, row in enumerate(slots):
        row[:tokens] = torch.randperm(4 * tokens + 4, generator=rng)[:tokens]
        row[:tokens] += 10_000 * (number == 1)
    slots = slots[:, : tokens + padding]
    keys, values = [], []
    for number, (_, (heads, _), widths) in enumerate(layers):
        kv = random_kv(tokens + padding, heads, widths, torch.float32, rng, fused=number in fused)
        for tensor, kept in zip(kv, (keys, values), strict=True):
            tensor[tokens:] = torch.nan
            kept.append(to_device(tensor, device))
    sampled = [int(torch.randint(1, drafts + 2, (), generator=rng)) for _, drafts in batch]
    num_sampled = torch.tensor(sampled, dtype=torch.int32, device=device)
    slots = to_device(slots, device)
    return Step(batch, slots if layers is MIXED else slots[0], keys, values, num_sampled)


class Bench:
    """Staging over NaN caches on a device, and vLLM's part of a window."""

    def __init__(self, device: torch.device, tokens: int, layers: Layers = ALIKE):
        room = -(-(4 * tokens + 4) // 8) * 8
        self.layers = []
        for number, (row, (heads, size), widths) in enumerate(layers):
            cache = torch.full((room // size, heads, size, sum(widths)), torch.nan, device=device)
            self.layers.append(LayerCache(str(number), cache, widths[0], torch.float32, row))
        self.staging = GpuStaging(self.layers, tokens, grouped=layers is MIXED)
        self.window = Window(self.staging)
        self.numbers = {layer.name: n for n, layer in enumerate(self.staging.layers)}

    def begin(self, batch: GpuWindowBatch, *, repeats: bool = False) -> None:
        self.staging.open(batch)
        self.window.begin(batch, repeats=repeats)

    def write_direct(self, step: Step, batch: GpuWindowBatch, number: int) -> None:
        """What a layer writes at once, with an attention's own write."""
        layer = self.layers[number]
        if batch.direct_slots is not None:
            slots = batch.direct_slots
            slots = slots if slots.dim() == 1 else slots[layer.slot_row]
            write_kv_cache(step.keys[number], step.values[number], layer.kv_cache, slots)

    def forward(self, step: Step, batch: GpuWindowBatch, layers: int | None = None) -> None:
        """The first layers' writes, as `StagingAttention` does it; what was copied may then go."""
        for number, layer in enumerate(self.layers[:layers]):
            key, value = step.keys[number], step.values[number]
            if batch.copied:
                key, value = key.clone(), value.clone()
            assert self.window.stage(self.numbers[layer.name], key, value)
            self.write_direct(step, batch, number)
            if batch.copied:
                key.fill_(torch.nan)
                value.fill_(torch.nan)

    def settle(self, step: Step, in_commit: bool = False) -> None:
        if in_commit:
            self.staging.validate_in_commit(lambda launch, counts: launch(counts))
        assert self.window.accept(step.num_sampled if in_commit else step.accepted())
        assert self.window.commit()
        assert self.window.close().fallback_reason is None
        assert not self.staging.errors.any()

    def give_up(self) -> None:
        self.window.abort("planted")
        assert self.window.close().fallback_reason == "planted"
        assert not self.staging.errors.any()

    def clear(self) -> None:
        for layer in self.layers:
            layer.kv_cache.fill_(torch.nan)

    def expect(self, step: Step, rows: Sequence[int], layers: int | None = None) -> None:
        """Exactly these rows are in the caches of the first layers, all else was never written."""
        for number, layer in enumerate(self.layers):
            expected, size = torch.full_like(layer.kv_cache, torch.nan), layer.kv_cache.shape[2]
            slots = step.slots if step.slots.dim() == 1 else step.slots[layer.slot_row]
            for row in rows if number < (layers or len(self.layers)) else ():
                block, offset = divmod(int(slots[row]), size)
                both = step.keys[number][row], step.values[number][row]
                expected[block, :, offset] = torch.cat(both, dim=-1)
            assert_same(layer.kv_cache, expected)


class Captured:
    """What `StagingGraphs` keeps of a capture on padding: addresses of K/V and of slots."""

    def __init__(self, bench: Bench, step: Step, way: str):
        self.bench, self.inputs = bench, step  # a replay's K/V and slots come to these places
        step.slots.fill_(-1)
        batch = step.plan(way)
        bench.begin(batch, repeats=True)
        for _ in range(2):  # warm-up and capture
            for number, layer in enumerate(bench.layers):
                key, value = step.keys[number], step.values[number]
                assert bench.window.stage(bench.numbers[layer.name], key, value)
        self.batch = replace(batch, sources=bench.staging.captured_sources())
        bench.window.forget()
        bench.staging.warm_up(self.batch)

    def replay(self, step: Step) -> None:
        """The captured kernels read the K/V and slots that lie there now; no layer is called."""
        self.inputs.slots.copy_(step.slots)
        batch = replace(self.batch, num_draft_tokens=tuple(step.drafts))
        if batch.copied:
            set_slots(batch, self.inputs.slots)
        else:
            batch = replace(batch, slots=self.inputs.slots)
        self.bench.begin(batch)
        for number, layer in enumerate(self.bench.layers):
            key, value = self.inputs.keys[number], self.inputs.values[number]
            key.copy_(step.keys[number])
            value.copy_(step.values[number])
            if batch.copied:
                self.bench.staging.stage(self.bench.numbers[layer.name], key, value, batch.rows)
                self.bench.write_direct(self.inputs, batch, number)
                key.fill_(torch.nan)
                value.fill_(torch.nan)
        self.bench.window.replayed()


equal_batches = st.tuples(st.integers(1, 4), st.integers(1, 5)).map(
    lambda size: [(size[1] + 1, size[1])] * size[0]
)
uneven_batches = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 4)).map(lambda n: (n[0], min(n[1], n[0] - 1))),
    min_size=1,
    max_size=4,
).filter(lambda batch: any(drafts for _, drafts in batch))


@examples(12)
@given(
    batch=equal_batches, seed=SEEDS, in_commit=st.booleans(), layers=st.sampled_from([ALIKE, MIXED])
)
def test_equal_windows_are_committed_alike_whatever_the_way(
    triton_device, batch, seed, in_commit, layers
):
    step = make_step(batch, seed, triton_device, layers=layers)
    for way in WAYS if not in_commit else WAYS[:2]:
        bench = Bench(triton_device, step.tokens, layers)
        assert [len(each.layers) for each in bench.staging.sets] == [2] * (len(layers) // 2)
        plan = step.plan(way)
        bench.begin(plan)
        bench.forward(step, plan)
        bench.settle(step, in_commit)
        bench.expect(step, step.kept())
        certain_at_once = 0 if way == "whole step" else len(batch)
        stored = [len(step.kept()) - certain_at_once] * len(layers)
        assert bench.staging.written.tolist() == stored


@examples(12)
@given(
    batch=uneven_batches, seed=SEEDS, way=st.sampled_from(WAYS[2:]),
    layers=st.sampled_from([ALIKE, MIXED]),
)  # fmt: skip
def test_uneven_windows_are_committed_alike(triton_device, batch, seed, way, layers):
    step = make_step(batch, seed, triton_device, layers=layers)
    bench, plan = Bench(triton_device, step.tokens, layers), step.plan(way)
    bench.begin(plan)
    bench.forward(step, plan)
    bench.settle(step)
    bench.expect(step, step.kept())


@examples(12)
@given(
    drafts=st.integers(1, 4),
    captured=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(1, 4), SEEDS, st.booleans()), min_size=1, max_size=3),
    way=st.sampled_from(WAYS[:2]),
    layers=st.sampled_from([ALIKE, MIXED]),
    fused=st.booleans(),
)
def test_one_captured_shape_serves_steps_of_fewer_requests(
    triton_device, drafts, captured, steps, way, layers, fused
):
    length = drafts + 1
    bench = Bench(triton_device, captured * length, layers)
    fused_layers = range(len(layers) if fused else 0)
    inputs = make_step(
        [(length, drafts)] * captured, 0, triton_device, layers=layers, fused=fused_layers
    )
    graph = Captured(bench, inputs, way)
    for requests, seed, in_commit in steps:
        requests = min(requests, captured)
        padding = (captured - requests) * length
        batch = [(length, drafts)] * requests
        step = make_step(batch, seed, triton_device, padding, layers=layers)
        bench.clear()
        graph.replay(step)
        bench.settle(step, in_commit)
        bench.expect(step, step.kept())


@pytest.mark.parametrize("padded", [0, 2])
def test_a_replay_given_up_writes_every_draft_but_no_padding(triton_device, padded):
    inputs = make_step([(4, 3)] * 4, 0, triton_device)
    bench = Bench(triton_device, inputs.tokens)
    graph = Captured(bench, inputs, "equal drafts")
    step = make_step([(4, 3)] * (4 - padded), 3, triton_device, padded * 4)
    graph.replay(step)
    bench.give_up()
    bench.expect(step, range(step.tokens))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [4, 3, 1])
def test_a_window_that_is_given_up_is_written_whole_where_it_was_staged(triton_device, way, layers):
    step = make_step([(4, 3)] * 3, 5, triton_device, layers=MIXED)
    bench, plan = Bench(triton_device, step.tokens, MIXED), step.plan(way)
    bench.begin(plan)
    bench.forward(step, plan, layers)
    bench.give_up()
    assert not bench.staging.written.any()
    bench.expect(step, range(step.tokens), layers)


def end_by_commit(bench: Bench, step: Step) -> None:
    bench.settle(step)


def end_by_abort(bench: Bench, step: Step) -> None:
    bench.give_up()


def end_by_withdrawal(bench: Bench, step: Step) -> None:
    assert bench.window.accept(step.accepted())
    assert bench.window.commit()
    bench.window.withdraw("planted")
    bench.window.close()


def end_of_a_step_that_died(bench: Bench, step: Step) -> None:
    assert close_leftover(bench.window) is not None


@pytest.mark.parametrize(
    "end", [end_by_commit, end_by_abort, end_by_withdrawal, end_of_a_step_that_died]
)
def test_a_window_lets_go_of_the_steps_tensors_as_it_ends(triton_device, end):
    """Not as the next one begins: in between the drafter runs, and perhaps a large prefill."""
    step = make_step([(3, 2), (3, 2)], 0, triton_device)
    bench = Bench(triton_device, step.tokens)
    (kept,) = bench.staging.sets
    for _ in range(3):
        batch = step.plan("whole step")
        bench.begin(batch)
        bench.forward(replace(step, keys=[k.clone() for k in step.keys],
                              values=[v.clone() for v in step.values]), batch)  # fmt: skip
        held = [ref(tensor) for tensor in (*kept.keys, *kept.values)]
        planned = ref(batch)
        assert None not in [tensor() for tensor in held]
        end(bench, step)
        del batch
        assert [tensor() for tensor in held] == [None] * (2 * len(ALIKE))
        assert planned() is None


def test_a_mixed_step_holds_copies_of_its_drafts_and_nothing_of_the_step(triton_device):
    """A request with drafts beside a prefill of 50 tokens, planned as the V2 runner's hook does."""
    step = make_step([(3, 2), (50, 0)], 5, triton_device)
    planner = WindowPlanner(3, 0, 2, None, triton_device)
    input_batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=step.tokens,
        num_draft_tokens=2,
        num_draft_tokens_per_req=np.array(step.drafts, dtype=np.int32),
        query_start_loc_np=step.starts,
    )
    batch, reason = planner.plan(input_batch, step.slots[None], None)
    assert reason is None
    bench = Bench(triton_device, step.tokens)
    (kept,) = bench.staging.sets
    bench.begin(batch)
    seen = []
    for number, layer in enumerate(bench.layers):
        key, value = step.keys[number].clone(), step.values[number].clone()
        seen += [ref(key), ref(value)]
        assert bench.window.stage(number, key, value)
        write_kv_cache(key, value, layer.kv_cache, batch.direct_slots)
        del key, value
        assert [tensor() for tensor in seen] == [None] * len(seen)  # while the forward still runs
    held = {t.untyped_storage().data_ptr() for t in (*kept.keys, *kept.values)}
    assert held == {bench.staging.copies.untyped_storage().data_ptr()}
    bench.settle(step)
    bench.expect(step, step.kept())


def test_a_bad_slot_of_a_group_stops_its_launch_and_says_in_which_layer(triton_device):
    step = make_step([(4, 3)] * 3, 7, triton_device, layers=MIXED)
    bench = Bench(triton_device, step.tokens, MIXED)
    step.slots[2, 5] = 10**6
    plan = step.plan("whole step")
    bench.begin(plan)
    bench.forward(step, plan)
    assert bench.window.accept(step.accepted())
    bench.window.commit()
    flags = zip(bench.staging.layers, bench.staging.errors.tolist(), strict=True)
    assert [layer.name for layer, flag in flags if flag] == ["2", "3"]
    bench.expect(step, [])


def test_layers_of_one_set_may_be_laid_out_differently(triton_device):
    """K of Llama 4's fourth layers is a view of the QKV, that of the others is not.

    The first window of a size is held by copy, which lays out all layers alike: the second tells.
    """
    step = make_step([(4, 3)] * 3, 4, triton_device, layers=MIXED, fused=(2, 3))
    bench = Bench(triton_device, step.tokens, MIXED)
    for _ in range(2):
        bench.clear()
        plan = step.plan("whole step")
        bench.begin(plan)
        bench.forward(step, plan)
        bench.settle(step)
        bench.expect(step, step.kept())


def test_memory_of_a_layer_laid_out_differently_may_serve_the_next_one(triton_device):
    """Copies are held of such a layer; on an H200 a V cloned in one read as values that were lost.

    Only the second window of a size is held by reference.
    """
    layers = ALIKE[:1] * 3
    step = make_step([(4, 3)] * 3, 4, triton_device, layers=layers, fused=(0,))
    bench = Bench(triton_device, step.tokens, layers)
    for buffer in (None, torch.empty_like(step.values[1])):
        bench.clear()
        bench.begin(step.plan("whole step"))
        for number, (key, value) in enumerate(zip(step.keys, step.values, strict=True)):
            value = value if number == 0 or buffer is None else buffer.copy_(value)
            assert bench.window.stage(bench.numbers[str(number)], key, value)
        bench.settle(step)
        bench.expect(step, step.kept())


def test_a_capture_that_is_given_up_writes_nothing(triton_device):
    """A capture's tokens are not real, and it allows no plan to be copied to the device."""
    step = make_step([(4, 3)] * 3, 6, triton_device, layers=MIXED)
    bench = Bench(triton_device, step.tokens, MIXED)
    bench.begin(step.plan("whole step"), repeats=True)
    for layer in (0, 1):
        assert bench.window.stage(layer, step.keys[0], step.values[0]) is (layer == 0)
    assert bench.window.fallback_reason == "stage:activations_reused"
    bench.expect(step, [])
