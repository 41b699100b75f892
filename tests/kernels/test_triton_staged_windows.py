"""Windows staged by copy and by reference leave the same caches, those that acceptance asks for.

The plugin's own staging and plans over random K/V: equal windows and uneven ones, eager steps and
replays of a captured shape with padding, both ways to commit, and windows that are given up. Then
target layers of two cache shapes and three KV-cache groups.
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
from kernel_inputs import SEEDS, assert_same, generator, nan_caches, random_kv, to_device
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

LAYERS, KV_HEADS, WIDTHS, BLOCK_SIZE = 2, 2, (16, 8), 4


@dataclass
class Step:
    """One step: rows and drafts of each request, its slots, K/V of each layer.

    `num_sampled` counts each request's certain token and its accepted drafts.
    """

    rows: list[int]
    drafts: list[int]
    slots: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    num_sampled: Tensor
    padding: int = 0

    @property
    def ends(self) -> list[int]:
        return np.cumsum(self.rows).tolist()

    @property
    def tokens(self) -> int:
        return sum(self.rows)

    @property
    def counts(self) -> StepDrafts:
        return StepDrafts(np.array(self.drafts, dtype=np.int32), self.tokens)

    def accepted(self) -> Tensor:
        """[requests] int32, accepted drafts."""
        return (self.num_sampled - 1).clamp(min=0)

    def kept(self, every_draft: bool = False) -> list[tuple[int, int]]:
        """(row, slot) of all that belongs in the cache after the step."""
        found = []
        each = zip(self.rows, self.drafts, self.ends, self.accepted().tolist(), strict=True)
        for rows, drafts, end, accepted in each:
            last = end if every_draft else end - drafts + accepted
            found += [(row, int(self.slots[row])) for row in range(end - rows, last)]
        return found


def make_step(
    batch: list[tuple[int, int]], seed: int, device: torch.device, padding: int = 0
) -> Step:
    """Random slots and K/V; padding rows have slot -1 and NaN."""
    rng = generator(seed)
    rows, drafts = [n for n, _ in batch], [d for _, d in batch]
    tokens = sum(rows)
    slots = torch.full((tokens + padding,), -1, dtype=torch.int64)
    slots[:tokens] = torch.randperm(4 * tokens + BLOCK_SIZE, generator=rng)[:tokens]
    keys, values = [], []
    for _ in range(LAYERS):
        kv = random_kv(tokens + padding, KV_HEADS, WIDTHS, torch.float32, rng, fused=False)
        for tensor, kept in zip(kv, (keys, values), strict=True):
            tensor[tokens:] = torch.nan
            kept.append(tensor.to(device))
    sampled = [int(torch.randint(1, d + 2, (), generator=rng)) for d in drafts]
    num_sampled = torch.tensor(sampled, dtype=torch.int32, device=device)
    return Step(rows, drafts, slots.to(device), keys, values, num_sampled, padding)


class Bench:
    """Staging over NaN caches on a device, and vLLM's part of a window."""

    def __init__(self, capacity: int, blocks: int, device: torch.device):
        shape = (blocks, KV_HEADS, BLOCK_SIZE, sum(WIDTHS))
        with torch.device(device):
            self.memory, caches = nan_caches(LAYERS, shape, torch.float32, "layers_interleaved")
        layers = [LayerCache(str(n), c, WIDTHS[0], torch.float32) for n, c in enumerate(caches)]
        self.caches = caches
        self.staging = GpuStaging(layers, capacity)
        (self.held,) = self.staging.sets
        self.window = Window(self.staging)

    def forward(self, step: Step, batch: GpuWindowBatch, layers: int = LAYERS) -> None:
        """Every layer's write, as `StagingAttention` does it; what was copied may then go."""
        for layer in range(layers):
            key, value = step.keys[layer].clone(), step.values[layer].clone()
            assert self.window.stage(layer, key, value)
            if batch.direct_slots is not None:
                write_kv_cache(key, value, self.caches[layer], batch.direct_slots)
            if batch.copied:
                key.fill_(torch.nan)
                value.fill_(torch.nan)

    def run(self, step: Step, batch: GpuWindowBatch, in_commit: bool) -> None:
        """An eager window from beginning to end."""
        self.begin(batch)
        self.forward(step, batch)
        self.settle(step, in_commit)

    def begin(self, batch: GpuWindowBatch) -> None:
        self.staging.open(batch)
        self.window.begin(batch)

    def settle(self, step: Step, in_commit: bool) -> None:
        if in_commit:
            self.staging.validate_in_commit(lambda launch, counts: launch(counts))
        assert self.window.accept(step.num_sampled if in_commit else step.accepted())
        assert self.window.commit()
        assert self.window.close().fallback_reason is None
        assert not self.staging.errors.any()

    def replay(self, step: Step, captured: GpuWindowBatch, in_commit: bool) -> None:
        """A captured window: its K/V lie where the capture's were, and no layer is called."""
        own = replace(captured, num_draft_tokens=tuple(step.drafts))
        self.slot_mapping.copy_(step.slots)
        if captured.copied:
            set_slots(own, self.slot_mapping)
        else:
            own = replace(own, slots=self.slot_mapping)
        self.begin(own)
        self.graph(step, own)
        self.window.replayed()
        self.settle(step, in_commit)

    def capture(self, requests: int, length: int, batch: GpuWindowBatch) -> GpuWindowBatch:
        """What `StagingGraphs` keeps of a capture on padding."""
        tokens = requests * length
        self.slot_mapping = torch.full((tokens,), -1, device=self.memory.device)  # vLLM's own
        self.inputs = [
            torch.full((2, tokens, KV_HEADS, width), torch.nan, device=self.memory.device)
            for width in WIDTHS
        ]
        self.staging.open(batch)
        self.window.begin(batch, repeats=True)
        for _ in range(2):  # warm-up and capture
            for layer in range(LAYERS):
                key, value = (kind[layer] for kind in self.inputs)
                assert self.window.stage(layer, key, value)
        sources = self.staging.captured_sources()
        self.window.forget()
        captured = replace(batch, sources=sources)
        self.staging.warm_up(captured)
        return captured

    def graph(self, step: Step, batch: GpuWindowBatch) -> None:
        """What the captured kernels do: they read the K/V and slots that lie there now."""
        keys, values = self.inputs
        for layer in range(LAYERS):
            keys[layer].copy_(step.keys[layer])
            values[layer].copy_(step.values[layer])
            if batch.copied:
                self.staging.stage(layer, keys[layer], values[layer], batch.rows)
                assert batch.direct_slots is not None
                write_kv_cache(keys[layer], values[layer], self.caches[layer], batch.direct_slots)
                keys[layer].fill_(torch.nan)
                values[layer].fill_(torch.nan)

    def expect(self, step: Step, entries: list[tuple[int, int]]) -> None:
        """Exactly these rows are in every layer's cache, all else was never written."""
        expected = torch.full_like(self.memory, torch.nan)
        for layer in range(LAYERS):
            for row, slot in entries:
                to = expected[:, layer][slot // BLOCK_SIZE, :, slot % BLOCK_SIZE]
                to.copy_(torch.cat([step.keys[layer][row], step.values[layer][row]], dim=-1))
        assert_same(self.memory, expected)


def bench_for(step: Step) -> Bench:
    slots = 4 * step.tokens + BLOCK_SIZE
    capacity = sum(step.drafts) + step.padding
    return Bench(capacity, -(-slots // BLOCK_SIZE), step.slots.device)


equal_batches = st.tuples(st.integers(1, 4), st.integers(1, 5)).map(
    lambda size: [(size[1] + 1, size[1])] * size[0]
)
uneven_batches = st.lists(
    st.tuples(st.integers(1, 5), st.integers(0, 4)).map(lambda n: (n[0], min(n[1], n[0] - 1))),
    min_size=1,
    max_size=4,
).filter(lambda batch: any(drafts for _, drafts in batch))


@examples(12)
@given(batch=equal_batches, seed=SEEDS, in_commit=st.booleans())
def test_equal_windows_are_committed_alike_by_copy_and_by_reference(
    triton_device, batch, seed, in_commit
):
    step = make_step(batch, seed, triton_device)
    requests, length = len(batch), batch[0][0]
    held = bench_for(step)
    rows = torch.arange(step.tokens, device=triton_device)
    held.run(step, whole_step(step.counts, length, rows, step.slots), in_commit)
    copied = bench_for(step)
    plan = equal_drafts(requests, length, triton_device)
    set_slots(plan, step.slots)
    copied.run(step, plan, in_commit)
    for bench in (held, copied):
        bench.expect(step, step.kept())


def end_by_commit(bench: Bench, step: Step) -> None:
    bench.settle(step, in_commit=False)


def end_by_abort(bench: Bench, step: Step) -> None:
    bench.window.abort("planted")
    bench.window.close()


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
    rows = torch.arange(step.tokens, device=triton_device)
    bench = bench_for(step)
    for _ in range(3):
        batch = whole_step(step.counts, 3, rows, step.slots)
        bench.begin(batch)
        bench.forward(step, batch)
        held = [ref(tensor) for tensor in (*bench.held.keys, *bench.held.values)]
        planned = ref(batch)
        assert None not in [tensor() for tensor in held]
        end(bench, step)
        del batch
        assert [tensor() for tensor in held] == [None] * (2 * LAYERS)
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
        query_start_loc_np=np.array([0, *step.ends], dtype=np.int32),
    )
    batch, reason = planner.plan(input_batch, step.slots[None], None)
    assert reason is None
    bench = Bench(4, 4 * step.tokens, triton_device)
    bench.begin(batch)
    seen = []
    for layer in range(LAYERS):
        key, value = step.keys[layer].clone(), step.values[layer].clone()
        seen += [ref(key), ref(value)]
        assert bench.window.stage(layer, key, value)
        write_kv_cache(key, value, bench.caches[layer], batch.direct_slots)
        del key, value
        assert [tensor() for tensor in seen] == [None] * len(seen)  # while the forward still runs
    held = {t.untyped_storage().data_ptr() for t in (*bench.held.keys, *bench.held.values)}
    assert held == {bench.staging.copies.untyped_storage().data_ptr()}
    bench.settle(step, in_commit=False)
    bench.expect(step, step.kept())


@examples(12)
@given(batch=uneven_batches, seed=SEEDS, copied=st.booleans())
def test_uneven_windows_are_committed_alike(triton_device, batch, seed, copied):
    step = make_step(batch, seed, triton_device)
    starts = np.array([0, *step.ends], dtype=np.int32)
    bench = bench_for(step)
    bench.run(step, drafts_only(step.counts, starts, step.slots, copied=copied), in_commit=False)
    bench.expect(step, step.kept())


@examples(12)
@given(
    drafts=st.integers(1, 4),
    captured=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(1, 4), SEEDS, st.booleans()), min_size=1, max_size=3),
    by_copy=st.booleans(),
)
def test_one_captured_shape_serves_steps_of_fewer_requests(
    triton_device, drafts, captured, steps, by_copy
):
    length = drafts + 1
    tokens = captured * length
    bench = Bench(captured * drafts, 4 * tokens + BLOCK_SIZE, triton_device)
    if by_copy:
        padding = equal_drafts(captured, length, triton_device)
    else:
        counts = StepDrafts(np.full(captured, drafts, dtype=np.int32), tokens)
        rows = torch.arange(tokens, device=triton_device)
        padding = whole_step(counts, length, rows, torch.full_like(rows, -1))
    window = bench.capture(captured, length, padding)
    for requests, seed, in_commit in steps:
        requests = min(requests, captured)
        batch = [(length, drafts)] * requests
        step = make_step(batch, seed, triton_device, padding=(captured - requests) * length)
        bench.memory.fill_(torch.nan)
        bench.replay(step, window, in_commit)
        bench.expect(step, step.kept())


@pytest.mark.parametrize("padded", [0, 2])
def test_a_replay_given_up_writes_every_draft_but_no_padding(triton_device, padded):
    drafts, length, captured = 3, 4, 4
    step = make_step([(length, drafts)] * (captured - padded), 3, triton_device, padded * length)
    bench = Bench(captured * drafts, 4 * captured * length, triton_device)
    window = bench.capture(captured, length, equal_drafts(captured, length, triton_device))
    own = replace(window, num_draft_tokens=tuple(step.drafts))
    set_slots(own, step.slots)
    bench.begin(own)
    bench.graph(step, own)
    bench.window.replayed()
    bench.window.abort("planted")
    assert bench.window.close().fallback_reason == "planted"
    assert not bench.staging.errors.any()
    bench.expect(step, step.kept(every_draft=True))


# --- layers of two cache shapes and three KV-cache groups ---

REQUESTS, LENGTH = 3, 4
TOKENS = REQUESTS * LENGTH
GROUPS = 3
"""Rows of slots; the middle one belongs to no target layer, and its slots fit no cache."""

SHAPES = [(0, (2, 4), (16, 8)), (0, (1, 8), (32, 32)), (2, (2, 4), (16, 8)), (2, (1, 8), (32, 32))]
"""Each layer's row of slots, (K/V heads, block size) and (K width, V width)."""

WAYS = ("whole step", "equal drafts", "drafts by reference", "drafts by copy")


def plan_of(way: str, slots: Tensor) -> GpuWindowBatch:
    counts = StepDrafts(np.full(REQUESTS, LENGTH - 1, dtype=np.int32), TOKENS)
    if way == "whole step":
        return whole_step(counts, LENGTH, torch.arange(TOKENS, device=slots.device), slots)
    if way == "equal drafts":
        batch = equal_drafts(REQUESTS, LENGTH, slots.device, slots.shape[:-1])
        set_slots(batch, slots)
        return batch
    starts = np.arange(0, TOKENS + 1, LENGTH, dtype=np.int32)
    return drafts_only(counts, starts, slots, copied=way == "drafts by copy")


class SetBench:
    """Layers of SHAPES over NaN caches, and one step of equal windows.

    K and V of the layers whose numbers are in `fused` are views of a QKV.
    """

    def __init__(self, device: torch.device, seed: int, fused: Sequence[int] = ()):
        rng = generator(seed)
        self.layers, self.keys, self.values = [], [], []
        for number, (row, (heads, size), widths) in enumerate(SHAPES):
            cache = torch.full((96 // size, heads, size, sum(widths)), torch.nan, device=device)
            self.layers.append(LayerCache(str(number), cache, widths[0], torch.float32, row))
            kv = random_kv(TOKENS, heads, widths, torch.float32, rng, fused=number in fused)
            self.keys.append(to_device(kv[0], device))
            self.values.append(to_device(kv[1], device))
        slots = torch.stack([torch.randperm(96, generator=rng)[:TOKENS] for _ in range(GROUPS)])
        slots[1] += 10_000
        # As vLLM keeps them: rows of a wider buffer.
        wide = torch.full((GROUPS, TOKENS + 5), -1)
        wide[:, :TOKENS] = slots
        self.slots = wide.to(device)[:, :TOKENS]
        self.accepted = torch.tensor([3, 0, 2], dtype=torch.int32, device=device)
        self.staging = GpuStaging(self.layers, REQUESTS * LENGTH, grouped=True)
        self.window = Window(self.staging)
        self.numbers = {layer.name: n for n, layer in enumerate(self.staging.layers)}

    def run(self, way: str, layers: int = len(SHAPES)) -> GpuWindowBatch:
        """Open a window and stage its first layers in the model's order."""
        batch = plan_of(way, self.slots)
        self.staging.open(batch)
        self.window.begin(batch)
        each = zip(self.layers, self.keys, self.values, strict=True)
        for layer, key, value in list(each)[:layers]:
            assert self.window.stage(self.numbers[layer.name], key, value)
            if batch.direct_slots is not None:
                direct = batch.direct_slots_of[layer.slot_row]
                write_kv_cache(key, value, layer.kv_cache, direct)
        return batch

    def expect(self, rows: list[int], layers: int = len(SHAPES)) -> None:
        for number, layer in enumerate(self.layers):
            expected = torch.full_like(layer.kv_cache, torch.nan)
            if number < layers:
                key, value = self.keys[number][rows], self.values[number][rows]
                write_kv_cache(key, value, expected, self.slots[layer.slot_row, rows])
            assert_same(layer.kv_cache, expected)


KEPT_ROWS = [0, 1, 2, 3, 4, 8, 9, 10]
"""The certain first tokens, and three, none and two accepted drafts."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_commit", [False, True])
def test_every_layer_gets_its_rows_in_its_groups_slots(
    way: str, in_commit: bool, triton_device: torch.device
) -> None:
    bench = SetBench(triton_device, 3)
    assert [len(each.layers) for each in bench.staging.sets] == [2, 2]
    bench.run(way)
    counts = bench.accepted
    if in_commit:
        bench.staging.validate_in_commit(lambda launch, given: launch(given))
        counts = counts + 1
    assert bench.window.accept(counts)
    assert bench.window.commit()
    assert bench.window.close().fallback_reason is None
    assert not bench.staging.errors.any()
    assert bench.staging.written.tolist() == [len(KEPT_ROWS) - certain_at_once(way)] * len(SHAPES)
    bench.expect(KEPT_ROWS)


def certain_at_once(way: str) -> int:
    """First tokens that no commit writes."""
    return 0 if way == "whole step" else REQUESTS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [4, 3, 1])
def test_a_window_that_is_given_up_is_written_whole_where_it_was_staged(
    way: str, layers: int, triton_device: torch.device
) -> None:
    bench = SetBench(triton_device, 5)
    bench.run(way, layers)
    bench.window.abort("planted")
    assert bench.window.close().fallback_reason == "planted"
    assert not bench.staging.written.any()
    bench.expect(list(range(TOKENS)), layers)


def test_a_bad_slot_of_a_group_stops_its_launch_and_says_in_which_layer(
    triton_device: torch.device,
) -> None:
    bench = SetBench(triton_device, 7)
    bench.slots[2, 5] = 96
    bench.run("whole step")
    assert bench.window.accept(bench.accepted)
    bench.window.commit()
    errors = bench.staging.errors.tolist()
    flagged = [layer.name for layer, flag in zip(bench.staging.layers, errors, strict=True) if flag]
    assert flagged == ["2", "3"]
    bench.expect([])


@pytest.mark.parametrize("way", ["whole step", "equal drafts"])
def test_a_captured_window_is_committed_from_each_sets_addresses(
    way: str, triton_device: torch.device
) -> None:
    """K and V are views of a fused QKV, as in most models: a replay fills them anew."""
    bench = SetBench(triton_device, 9, fused=range(len(SHAPES)))
    batch = plan_of(way, bench.slots)
    bench.staging.open(batch)
    bench.window.begin(batch, repeats=True)
    for _ in range(2):  # warm-up and capture
        for layer, key, value in zip(bench.layers, bench.keys, bench.values, strict=True):
            assert bench.window.stage(bench.numbers[layer.name], key, value)
    captured = replace(batch, sources=bench.staging.captured_sources())
    bench.window.forget()
    if captured.copied:  # what the graph's kernels and its direct writes leave
        for layer, key, value in zip(bench.layers, bench.keys, bench.values, strict=True):
            direct = captured.direct_slots_of[layer.slot_row]
            write_kv_cache(key, value, layer.kv_cache, direct)
    else:
        for rows in (*bench.keys, *bench.values):
            rows.neg_()
    bench.staging.open(captured)
    bench.window.begin(captured)
    bench.window.replayed()
    assert bench.window.accept(bench.accepted)
    assert bench.window.commit()
    bench.window.close()
    assert not bench.staging.errors.any()
    assert bench.staging.written.tolist() == [len(KEPT_ROWS) - certain_at_once(way)] * len(SHAPES)
    bench.expect(KEPT_ROWS)


def test_layers_of_one_set_may_be_laid_out_differently(triton_device: torch.device) -> None:
    """K of Llama 4's fourth layers is a view of the QKV, that of the others is not.

    The first window of a size is held by copy, which lays out all layers alike: the second tells.
    """
    bench = SetBench(triton_device, 4, fused=(2, 3))
    for _ in range(2):
        for layer in bench.layers:
            layer.kv_cache.fill_(torch.nan)
        bench.run("whole step")
        assert bench.window.accept(bench.accepted)
        assert bench.window.commit()
        assert bench.window.close().fallback_reason is None
        bench.expect(KEPT_ROWS)


def test_a_capture_that_is_given_up_writes_nothing(triton_device: torch.device) -> None:
    """A capture's tokens are not real, and it allows no plan to be copied to the device."""
    bench = SetBench(triton_device, 6)
    batch = plan_of("whole step", bench.slots)
    bench.staging.open(batch)
    bench.window.begin(batch, repeats=True)
    for layer in (0, 1):
        assert bench.window.stage(layer, bench.keys[0], bench.values[0]) is (layer == 0)
    assert bench.window.fallback_reason == "stage:activations_reused"
    bench.expect([])
