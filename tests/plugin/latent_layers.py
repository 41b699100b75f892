"""Latent target layers over a stock write and attention in torch, unwrapped or wrapped."""

from dataclasses import make_dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

LAYERS, DRAFTS, CONTEXT, BLOCK_SIZE, BLOCKS_EACH = 2, 3, 9, 4, 6
HEADS, LATENT, PE = 2, 8, 4
WIDTH = LATENT + PE


class StockImpl:
    """The stock write and absorbed attention of one layer; calls for prefills are counted."""

    scale, kv_lora_rank, kv_cache_dtype = 0.3, LATENT, "auto"
    dcp_world_size, need_to_return_lse_for_decode = 1, False

    def __init__(self) -> None:
        self.prefills = 0

    def do_kv_cache_update(
        self, latent: Tensor, key_pe: Tensor, cache: Tensor, slots: Tensor, kind: str, scale: Any
    ) -> None:
        rows, slots = torch.cat([latent, key_pe.squeeze(1)], dim=-1), slots[: len(latent)]
        cache.view(-1, cache.shape[-1])[slots[slots >= 0]] = rows[slots >= 0]

    def forward_mha(self, *_: Any) -> None:
        self.prefills += 1

    def forward_mqa(self, query: Any, cache: Tensor, metadata: Any, layer: Any) -> Any:
        joined = torch.cat(query, dim=-1) if isinstance(query, tuple) else query
        output = torch.full((*joined.shape[:2], LATENT), torch.nan)
        sums = torch.full(joined.shape[:2], -torch.inf)
        for request in range(metadata.num_decodes):
            first, last = metadata.query_start_loc[request : request + 2].tolist()
            length = int(metadata.decode.seq_lens[request])
            blocks = metadata.block_table[request]
            rows = cache[blocks.long()].flatten(0, 1)[:length]
            for row in range(first, last):
                seen = rows[: max(length - (last - row) + 1, 0)]
                scores = joined[row] @ seen.T * self.scale
                output[row] = scores.softmax(-1) @ seen[:, :LATENT]
                sums[row] = scores.logsumexp(-1)
        return output, sums if self.need_to_return_lse_for_decode else None


class FlashAttnMLAImpl(StockImpl):
    """Under this name stock attends committed tokens in our steps too."""


Decode = make_dataclass("Decode", ["seq_lens"])
Metadata = make_dataclass(
    "Metadata",
    ["num_reqs", "num_decodes", "causal", "query_start_loc", "block_table", "decode"],
)


class LatentLayers:
    """A step of requests of so many rows each; caches and rows are equal in every instance.

    `monkeypatch` wraps the layers.
    """

    def __init__(
        self,
        lengths: list[int],
        monkeypatch: pytest.MonkeyPatch | None = None,
        implementation: type[StockImpl] = StockImpl,
    ):
        from wrapped_layers import CpuStaging

        from nwor_bench.plugin.layers import LayerCache, rows_of
        from nwor_bench.plugin.window import Window

        self.lengths, self.requests = lengths, len(lengths)
        random = torch.Generator().manual_seed(3)
        blocks = self.requests * BLOCKS_EACH
        self.caches = [
            torch.randn(blocks, BLOCK_SIZE, WIDTH, generator=random) for _ in range(LAYERS)
        ]
        self.rows = torch.randn(LAYERS, sum(lengths), WIDTH, generator=random)
        self.query = torch.randn(sum(lengths), HEADS, WIDTH, generator=random)
        self.starts = np.cumsum([0, *lengths]).astype(np.int32)
        first = CONTEXT + np.arange(self.requests) * BLOCKS_EACH * BLOCK_SIZE - self.starts[:-1]
        self.slots = torch.from_numpy(np.repeat(first, lengths) + np.arange(sum(lengths)))
        self.outputs: list[Tensor] = []
        self.layers: list[Any] = [
            SimpleNamespace(
                impl=implementation(), kv_cache=cache, kv_lora_rank=LATENT, kv_cache_dtype="auto",
                _k_scale=None,
            )
            for cache in self.caches
        ]  # fmt: skip
        held = [LayerCache(str(n), *rows_of(e), torch.float32) for n, e in enumerate(self.layers)]
        self.staging = CpuStaging(held, self.requests * DRAFTS)
        self.window = Window(self.staging)
        if monkeypatch is not None:
            self._wrap(monkeypatch)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from nwor_bench.plugin.patching import PatchSet
        from nwor_bench.plugin.runner_v2 import mla_attention
        from nwor_bench.plugin.runner_v2.attention import AttentionGroup
        from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind, AttentionShape
        from nwor_bench.plugin.runner_v2.committed import CommittedOnly, decode_shortened
        from nwor_kernels.mla_verify_attention.reference import mla_verify_attention_reference

        def reference(step: Any, workspace: Any) -> None:
            mla_verify_attention_reference(step)

        monkeypatch.setattr(mla_attention, "mla_verify_attention_triton", reference)
        inputs = self._inputs(monkeypatch)
        cpu = torch.device("cpu")
        shape = AttentionShape("", HEADS, 1, WIDTH, LATENT, "float32", "auto", 4, latent=True)
        merges = mla_attention.merges(self.layers[0])
        kind: Any = AttentionKind(shape, 2, can_merge=merges)
        self.committed = CommittedOnly(inputs, self.requests, cpu, decode_shortened)
        workspace: Any = None
        group = AttentionGroup(kind, workspace, cpu, self.committed if merges else None)
        around = (self.window, self.staging, inputs, 0, group)
        self.wrapped = [
            mla_attention.MlaStagingAttention(number, layer, *around)  # type: ignore[arg-type]
            for number, layer in enumerate(self.layers)
        ]
        PatchSet(patch for each in self.wrapped for patch in each.patches()).apply()

    def metadata(self, num_decodes: int, **changes: Any) -> Any:
        """The step's, of which the first `num_decodes` requests are decodes."""
        starts = torch.from_numpy(self.starts)
        decode = Decode(self.seq_lens)
        stock = Metadata(self.requests, num_decodes, True, starts, self.block_table, decode)
        return replace(stock, **changes)

    def forward(
        self, num_decodes: int | None = None, silent: int | None = None, joined: bool = False,
        **changes: Any,
    ) -> "LatentLayers":  # fmt: skip
        """Run all layers; the write of layer `silent` runs past every hook."""
        decodes = len(self.lengths) if num_decodes is None else num_decodes
        metadata = self.metadata(decodes, **changes)
        until = int(self.starts[decodes])
        for number, layer in enumerate(self.layers):
            latent, key_pe = self.rows[number].split([LATENT, PE], dim=-1)
            write = (latent, key_pe.unsqueeze(1), layer.kv_cache, self.slots, "auto", None)
            if number == silent:
                StockImpl.do_kv_cache_update(layer.impl, *write)
            else:
                layer.impl.do_kv_cache_update(*write)
            if until < len(self.query):
                layer.impl.forward_mha(None, None, None, layer.kv_cache, metadata, None)
            query = self.query[:until]
            parts = query if joined else query.split([LATENT, PE], dim=-1)
            if until:
                args = (parts, layer.kv_cache, metadata, layer)
                self.outputs.append(layer.impl.forward_mqa(*args)[0])
        return self

    @property
    def seq_lens(self) -> Tensor:
        """[requests] int32, a new tensor each time."""
        return torch.tensor([CONTEXT + n for n in self.lengths], dtype=torch.int32)

    @property
    def block_table(self) -> Tensor:
        """[requests, blocks] int32."""
        table = torch.arange(self.requests * BLOCKS_EACH, dtype=torch.int32)
        return table.view(-1, BLOCKS_EACH)

    def _inputs(self, monkeypatch: pytest.MonkeyPatch) -> Any:
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


def check_same(ours: LatentLayers, stock: LatentLayers, *, caches: bool) -> None:
    """Attention gave the same; `caches`: whether the latent caches are to be equal too."""
    for one, other in zip(ours.outputs, stock.outputs, strict=True):
        torch.testing.assert_close(one, other)
    same = [torch.equal(a, b) for a, b in zip(ours.caches, stock.caches, strict=True)]
    assert same == [caches] * LAYERS
