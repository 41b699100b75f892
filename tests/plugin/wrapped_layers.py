"""Target layers over paged caches in torch, unwrapped or wrapped as in mode stage on a GPU."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.layers import LayerCache
from nwor_bench.plugin.patching import PatchSet
from nwor_bench.plugin.runner_v1.staging import write_kv_cache
from nwor_bench.plugin.runner_v2 import attention as gpu_attention
from nwor_bench.plugin.runner_v2 import staging as gpu_staging
from nwor_bench.plugin.runner_v2.attention import AttentionGroup, StagingAttention
from nwor_bench.plugin.runner_v2.attention_choice import AttentionKind, AttentionShape
from nwor_bench.plugin.runner_v2.plan import (
    GpuWindowBatch,
    StepDrafts,
    drafts_only,
    equal_drafts,
    set_slots,
    whole_step,
)
from nwor_bench.plugin.runner_v2.staged_layer import StepInputs
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.window import Window
from nwor_kernels.attention_step import AttentionStep, ScoreRules
from nwor_kernels.stage.reference import stage_kv_cache_reference
from nwor_kernels.verify_attention.reference import plan_attention, verify_attention_reference

LAYERS, REQUESTS, DRAFTS, CONTEXT = 3, 2, 3, 9
KV_HEADS, HEADS, WIDTH, BLOCK_SIZE = 2, 4, 8, 4
ROWS = REQUESTS * (DRAFTS + 1)
BLOCKS_EACH = 4


class CpuStaging(GpuStaging):
    """Real staging, except that torch copies, and writes a window given up, instead of Triton."""

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        with patch.object(gpu_staging, "stage_kv_cache_triton", stage_kv_cache_reference):
            return super().stage(layer, key, value, rows)

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        batch = self._batch
        assert batch is not None
        rows = slice(0, slots.numel()) if batch.copied else batch.rows
        for layer in layers:
            held, place = self.place(layer)
            cache = self.layers[layer].kv_cache
            write_kv_cache(held.keys[place][rows], held.values[place][rows], cache, slots)


class StockImpl:
    """The stock write and attention of one layer, over a paged cache."""

    scale, logits_soft_cap, sliding_window, kv_cache_dtype = 0.3, 0.0, (-1, -1), "auto"
    alibi_slopes = None

    def __init__(self) -> None:
        self.attended = 0

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        write_kv_cache(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: Any,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        self.attended += 1
        attend(query, kv_cache, metadata, output)
        return output


def attention_group(committed: Any = None, **more: Any) -> AttentionGroup:
    """How layers of these heads attend: by our kernel, unless `more` of the kind says otherwise."""
    shape = AttentionShape("Stock", HEADS, KV_HEADS, WIDTH, WIDTH, "float32", "auto", BLOCK_SIZE)
    kind, workspace = AttentionKind(shape, processors=2, **more), None
    return AttentionGroup(kind, workspace, torch.device("cpu"), committed)  # type: ignore[arg-type]


def attend(
    query: Tensor,
    kv_cache: Tensor,
    metadata: Any,
    output: Tensor,
    rows: Tensor | None = None,
    staged: tuple[Tensor, Tensor] | None = None,
) -> None:
    plan = plan_attention(
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        BLOCK_SIZE,
        staged_token_rows=rows,
    )
    verify_attention_reference(query, kv_cache, plan, output, ScoreRules(StockImpl.scale), staged)


def step_metadata() -> Any:
    """Each request's drafts and the token before, behind nine tokens of context."""
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32) * (DRAFTS + 1)
    table = torch.arange(REQUESTS * BLOCKS_EACH, dtype=torch.int32).view(REQUESTS, BLOCKS_EACH)
    return SimpleNamespace(
        query_start_loc=starts,
        seq_lens=torch.full((REQUESTS,), CONTEXT + DRAFTS + 1, dtype=torch.int32),
        block_table=table,
        max_seq_len=CONTEXT + DRAFTS + 1,
        causal=True,
        dynamic_causal=None,
    )


def runner_of() -> Any:
    """The runner whose inputs the step's metadata are made of."""
    step = step_metadata()
    layer = SimpleNamespace(kv_cache=torch.empty(1, 1, BLOCK_SIZE, 1))
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    group = SimpleNamespace(layer_names=["0"], kernel_block_size=None, kv_cache_spec=spec)
    slots = torch.full((1, ROWS), -1)
    return SimpleNamespace(
        input_buffers=SimpleNamespace(query_start_loc=step.query_start_loc, seq_lens=step.seq_lens),
        block_tables=SimpleNamespace(
            input_block_tables=[step.block_table], get_dummy_slot_mappings=lambda _: slots
        ),
        attn_groups=[[group]],
        compilation_config=SimpleNamespace(static_forward_context={"0": layer}),
        max_model_len=CONTEXT + DRAFTS + 1,
    )


def step_slots() -> Tensor:
    """[rows] int64: where the step's tokens belong."""
    places = CONTEXT + torch.arange(DRAFTS + 1)
    return torch.cat([r * BLOCKS_EACH * BLOCK_SIZE + places for r in range(REQUESTS)])


def planned(lengths: Sequence[int], drafts: int, slots: Tensor, *, copied: bool) -> GpuWindowBatch:
    """The window of requests with so many rows, as `WindowPlanner` plans it outside of graphs.

    Args:
        lengths: rows of each request; those of 1 + `drafts` rows have drafts, others have none.
        drafts: of a request.
        slots: [rows] int64, where each row belongs.
        copied: drafts are copied, not held.
    """
    own = np.array([drafts if n == drafts + 1 else 0 for n in lengths], dtype=np.int32)
    counts = StepDrafts(own, sum(lengths))
    if not (own == drafts).all():
        starts = np.cumsum([0, *lengths]).astype(np.int32)
        return drafts_only(counts, starts, slots, copied=copied)
    if not copied:
        return whole_step(counts, drafts + 1, torch.arange(sum(lengths)), slots)
    batch = equal_drafts(len(own), drafts + 1, slots.device)
    set_slots(batch, slots)
    return batch


class WrappedLayers:
    """Layers with equal random caches and K/V in every instance; `staged` wraps them."""

    def __init__(
        self,
        staged: bool,
        monkeypatch: Any = None,
        make_impl: Callable[[], Any] = StockImpl,
        make_group: Callable[[StepInputs], AttentionGroup] = lambda _: attention_group(),
    ):
        random = torch.Generator().manual_seed(5)
        both = 2 * WIDTH
        shape = (REQUESTS * BLOCKS_EACH, KV_HEADS, BLOCK_SIZE, both)
        self.caches = [torch.randn(shape, generator=random) for _ in range(LAYERS)]
        self.query = torch.randn(ROWS, HEADS, WIDTH, generator=random)
        fused = torch.randn(LAYERS, ROWS, KV_HEADS, both, generator=random)
        self.keys, self.values = list(fused[..., :WIDTH]), list(fused[..., WIDTH:])
        self.layers: list[Any] = [
            SimpleNamespace(impl=make_impl(), kv_cache=cache) for cache in self.caches
        ]
        for layer in self.layers:
            layer._k_scale = layer._v_scale = layer._q_scale = torch.ones(1)
        self.outputs: list[Tensor] = []
        self.verified: list[int] = []
        caches = [LayerCache(str(n), c, WIDTH, torch.float32) for n, c in enumerate(self.caches)]
        self.staging = CpuStaging(caches, REQUESTS * DRAFTS)
        (self.held,) = self.staging.sets
        self.window = Window(self.staging)
        self.inputs = StepInputs(runner_of(), ["0"])
        if staged:
            monkeypatch.setattr(gpu_attention, "verify_attention_triton", self._verify)
            around = self.window, self.staging, self.inputs, 0, make_group(self.inputs)
            self.wrapped = [
                StagingAttention(number, layer, *around) for number, layer in enumerate(self.layers)
            ]
            PatchSet(patch for made in self.wrapped for patch in made.patches()).apply()

    def begin(self, way: str) -> GpuWindowBatch:
        """Open a window that is held whole, or of which only the drafts are held or copied."""
        copied = way.endswith("copied")
        if way.startswith("drafts"):  # as if the requests' drafts were not equally many
            counts = StepDrafts(np.full(REQUESTS, DRAFTS, dtype=np.int32), ROWS)
            starts = np.arange(REQUESTS + 1, dtype=np.int32) * (DRAFTS + 1)
            batch = drafts_only(counts, starts, step_slots(), copied=copied)
        else:
            batch = planned([DRAFTS + 1] * REQUESTS, DRAFTS, step_slots(), copied=copied)
        self.inputs.open_capture(REQUESTS)
        self.staging.open(batch)
        self.window.begin(batch)
        return batch

    def forward(
        self,
        captured_write: Sequence[int] = (),
        metadata: Any = None,
        odd_layer: int | None = None,
        key_is_none: bool = False,
        buffers: tuple[Tensor, Tensor] | None = None,
        **scales: Any,
    ) -> None:
        """Run all layers; `odd_layer` with this metadata, without a key, or with these scales.

        The stock write of layers `captured_write` runs inside a graph, past every hook. `buffers`:
        every layer's K and V are put here first, as compiled code does.
        """
        for number, layer in enumerate(self.layers):
            key, value = self.keys[number], self.values[number]
            if buffers is not None:
                key, value = buffers[0].copy_(key), buffers[1].copy_(value)
            cache, odd = self.caches[number], number == odd_layer
            if number in captured_write or (odd and key_is_none):
                write_kv_cache(key, value, cache, step_slots())
            else:
                layer.impl.do_kv_cache_update(layer, key, value, cache, step_slots())
            given = (None, None) if odd and key_is_none else (key, value)
            used = metadata if odd and metadata is not None else step_metadata()
            output = torch.full((ROWS, HEADS, WIDTH), torch.nan)
            more = scales if odd else {}
            layer.impl.forward(layer, self.query, *given, cache, used, output, **more)
            self.outputs.append(output)

    def _verify(self, step: AttentionStep, *_: Any) -> None:
        number = next(n for n, cache in enumerate(self.caches) if cache is step.kv_cache)
        self.verified.append(number)
        batch = self.window.batch
        assert batch is not None
        held = slice(None) if batch.copied else batch.rows
        staged = step.key[held], step.value[held]
        attend(step.query, step.kv_cache, step.requests, step.output, batch.rows, staged)
