"""Latent target layers on a CPU.

The stock write is torch, and the kernel that merges a window in its reference. The stock attention,
and what wraps it, are each test's own.
"""

from collections.abc import Iterable
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

LAYERS, DRAFTS, CONTEXT, BLOCK_SIZE, BLOCKS_EACH = 2, 3, 9, 4, 6
HEADS, LATENT, PE = 2, 8, 4
WIDTH = LATENT + PE


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write [rows, width] where they belong; slots of -1 are skipped."""
    written = slots[: len(rows)] >= 0
    cache.view(-1, cache.shape[-1])[slots[: len(rows)][written]] = rows[written]


class StockWrite:
    """The stock write of one layer, and its attention of prefills, which are counted."""

    scale, kv_lora_rank, kv_cache_dtype = 0.3, LATENT, "auto"

    def __init__(self) -> None:
        self.prefills = 0

    def do_kv_cache_update(
        self, latent: Tensor, key_pe: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Any
    ) -> None:
        write_rows(cache, torch.cat([latent, key_pe.squeeze(1)], dim=-1), slots)

    def forward_mha(self, *_: Any) -> None:
        self.prefills += 1


class LatentStep:
    """A step of requests of so many rows each; caches and rows are equal in every instance."""

    def __init__(self, lengths: list[int]):
        self.lengths = lengths
        self.random = torch.Generator().manual_seed(3)
        tokens, self.requests = sum(lengths), len(lengths)
        self.blocks = (self.requests * BLOCKS_EACH, BLOCK_SIZE)
        self.caches = [
            torch.randn(*self.blocks, WIDTH, generator=self.random) for _ in range(LAYERS)
        ]
        self.rows = torch.randn(LAYERS, tokens, WIDTH, generator=self.random)
        self.query = torch.randn(tokens, HEADS, WIDTH, generator=self.random)
        self.starts = np.cumsum([0, *lengths]).astype(np.int32)
        self.request_of = np.repeat(np.arange(self.requests), lengths)
        self.positions = CONTEXT + np.arange(tokens) - self.starts[self.request_of]
        self.slots = torch.from_numpy(self.request_of * BLOCKS_EACH * BLOCK_SIZE + self.positions)
        self.outputs: list[Tensor] = []

    def add_layers(self, implementations: Iterable[Any]) -> None:
        """Make a layer of each implementation, real staging for all of them, and their window."""
        from wrapped_layers import CpuStaging

        from nwor_bench.plugin.layers import LayerCache, rows_of
        from nwor_bench.plugin.window import Window

        self.layers: list[Any] = [
            SimpleNamespace(
                impl=impl, kv_cache=cache, kv_lora_rank=LATENT, kv_cache_dtype="auto",
                _k_scale=None,
            )
            for impl, cache in zip(implementations, self.caches, strict=True)
        ]  # fmt: skip
        held = [LayerCache(str(n), *rows_of(e), torch.float32) for n, e in enumerate(self.layers)]
        self.staging = CpuStaging(held, self.requests * DRAFTS)
        self.window = Window(self.staging)

    @property
    def seq_lens(self) -> Tensor:
        """[requests] int32, a new tensor each time."""
        return torch.tensor([CONTEXT + n for n in self.lengths], dtype=torch.int32)

    @property
    def block_table(self) -> Tensor:
        """[requests, blocks] int32."""
        table = torch.arange(self.requests * BLOCKS_EACH, dtype=torch.int32)
        return table.view(-1, BLOCKS_EACH)

    def inputs(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """What our attention reads of the step; the window is merged in by the reference."""
        from nwor_bench.plugin.runner_v2 import mla_attention
        from nwor_bench.plugin.runner_v2.staged_layer import StepInputs
        from nwor_kernels.mla_verify_attention.reference import mla_tail_reference

        def tail_reference(step: Any, *more: Any) -> None:
            assert step.max_query_len == DRAFTS + 1
            mla_tail_reference(step, *more)

        monkeypatch.setattr(mla_attention, "mla_tail_triton", tail_reference)
        ends = torch.from_numpy(self.starts)
        views = SimpleNamespace(
            query_start_loc=ends, row_start=ends[:-1], row_end=ends[1:], seq_lens=self.seq_lens,
            block_tables=(self.block_table,),
        )  # fmt: skip
        inputs: Any = SimpleNamespace(views=views, max_seq_len=99)
        inputs.for_kernel = MethodType(StepInputs.for_kernel, inputs)
        return inputs

    def begin(self, copied: bool, control: bool = False) -> None:
        """Open a window, planned as `WindowPlanner` does outside of graphs."""
        from wrapped_layers import planned

        batch = planned(self.lengths, DRAFTS, self.slots, copied=copied)
        self.staging.open(batch)
        self.window.begin(batch, control=control)


def check_same(ours: LatentStep, stock: LatentStep, *, caches: bool) -> None:
    """Attention gave the same; `caches`: whether the latent caches are to be equal too."""
    for one, other in zip(ours.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(one, other)
    same = [torch.equal(a, b) for a, b in zip(ours.caches, stock.caches, strict=True)]
    assert same == [caches] * LAYERS
