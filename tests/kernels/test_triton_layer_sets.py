"""Target layers of two cache shapes and three KV-cache groups: each row lands where its layer's
group and shape say, whichever way the window is staged, committed or given up."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_inputs import assert_same, generator, random_kv, to_device
from torch import Tensor

pytest.importorskip("triton")
from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.runner_v1.staging import write_kv_cache
from nwor_bench.plugin.runner_v2.batch import (
    DraftCounts,
    GpuWindowBatch,
    drafts_only,
    equal_drafts,
    set_slots,
    whole_step,
)
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import Window

REQUESTS, LENGTH = 3, 4
TOKENS = REQUESTS * LENGTH
GROUPS = 3
"""Rows of slots; the middle one belongs to no target layer, and its slots fit no cache."""

SHAPES = [(0, (2, 4), (16, 8)), (0, (1, 8), (32, 32)), (2, (2, 4), (16, 8)), (2, (1, 8), (32, 32))]
"""Each layer's row of slots, (K/V heads, block size) and (K width, V width)."""

WAYS = ("whole step", "equal drafts", "drafts by reference", "drafts by copy")


def plan(way: str, slots: Tensor) -> GpuWindowBatch:
    counts = DraftCounts(np.full(REQUESTS, LENGTH - 1, dtype=np.int32), TOKENS)
    if way == "whole step":
        return whole_step(counts, LENGTH, torch.arange(TOKENS, device=slots.device), slots)
    if way == "equal drafts":
        batch = equal_drafts(REQUESTS, LENGTH, slots.device, slots.shape[:-1])
        set_slots(batch, slots)
        return batch
    starts = np.arange(0, TOKENS + 1, LENGTH, dtype=np.int32)
    return drafts_only(counts, starts, slots, copied=way == "drafts by copy")


class Bench:
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
        batch = plan(way, self.slots)
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


KEPT = [0, 1, 2, 3, 4, 8, 9, 10]
"""The certain first tokens, and three, none and two accepted drafts."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_commit", [False, True])
def test_every_layer_gets_its_rows_in_its_groups_slots(
    way: str, in_commit: bool, triton_device: torch.device
) -> None:
    bench = Bench(triton_device, 3)
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
    assert bench.staging.written.tolist() == [len(KEPT) - certain_at_once(way)] * len(SHAPES)
    bench.expect(KEPT)


def certain_at_once(way: str) -> int:
    """First tokens that no commit writes."""
    return 0 if way == "whole step" else REQUESTS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [4, 3, 1])
def test_a_window_that_is_given_up_is_written_whole_where_it_was_staged(
    way: str, layers: int, triton_device: torch.device
) -> None:
    bench = Bench(triton_device, 5)
    bench.run(way, layers)
    bench.window.abort("planted")
    assert bench.window.close().fallback_reason == "planted"
    assert not bench.staging.written.any()
    bench.expect(list(range(TOKENS)), layers)


def test_a_bad_slot_of_a_group_stops_its_launch_and_says_in_which_layer(
    triton_device: torch.device,
) -> None:
    bench = Bench(triton_device, 7)
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
    bench = Bench(triton_device, 9, fused=range(len(SHAPES)))
    batch = plan(way, bench.slots)
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
    assert bench.staging.written.tolist() == [len(KEPT) - certain_at_once(way)] * len(SHAPES)
    bench.expect(KEPT)


def test_layers_of_one_set_may_be_laid_out_differently(triton_device: torch.device) -> None:
    """K of Llama 4's fourth layers is a view of the QKV, that of the others is not.

    The first window of a size is held by copy, which lays out all layers alike: the second tells.
    """
    bench = Bench(triton_device, 4, fused=(2, 3))
    for _ in range(2):
        for layer in bench.layers:
            layer.kv_cache.fill_(torch.nan)
        bench.run("whole step")
        assert bench.window.accept(bench.accepted)
        assert bench.window.commit()
        assert bench.window.close().fallback_reason is None
        bench.expect(KEPT)


def test_a_capture_that_is_given_up_writes_nothing(triton_device: torch.device) -> None:
    """Its tokens are not real, and a capture allows no plan to be copied to the device."""
    bench = Bench(triton_device, 6)
    batch = plan("whole step", bench.slots)
    bench.staging.open(batch)
    bench.window.begin(batch, repeats=True)
    for layer in (0, 1):
        assert bench.window.stage(layer, bench.keys[0], bench.values[0]) is (layer == 0)
    assert bench.window.fallback_reason == "stage:activations_reused"
    bench.expect([])
