"""Commit in Triton: one launch writes the accepted rows to the caches of all layers.

The layers' caches are separate tensors. Their addresses stand in a table on the device that is
built once (`CommitPlan`); after that a commit does no host work per layer, never waits for the
device and can be captured in a CUDA graph.

All or nothing: every program checks every layer's metadata (8 bytes a layer) and all slots
(8 bytes each, from L2, and hidden behind the rows it has already begun to load), and so all come
to the same verdict without talking to each other. The first program alone writes error flags.
They follow from inputs that nobody writes, so a program that reads a flag too early or too late
decides the same.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_FLAG,
    ERROR_OVERFLOW,
    ERROR_SLOT_RANGE,
    STAGED_COUNT,
)
from nwor_kernels.tiles import check_chunk, count_and_largest, head_offsets, tiling

_STAGED_COUNT = tl.constexpr(STAGED_COUNT)
_ERROR_FLAG = tl.constexpr(ERROR_FLAG)
_OVERFLOW = tl.constexpr(ERROR_OVERFLOW)
_COUNT_MISMATCH = tl.constexpr(ERROR_COUNT_MISMATCH)
_SLOT_RANGE = tl.constexpr(ERROR_SLOT_RANGE)

_ELEMENT = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

MANY_ROWS = 8192
"""Rows x layers from which programs take several rows each: the GPU is full without them."""


class CommitPlan:
    """The caches of all target layers, ready to be committed to.

    It holds addresses, not tensors: keep the caches alive for as long as the plan is used.
    Building it copies the table to the device, so build it outside any graph capture.

    Args:
        kv_caches: one tensor a layer, [blocks, kv_heads, block_size, head_dim +
            value_head_dim]; dtype, strides and all sizes but `blocks` the same in every layer.

    Raises:
        ValueError: caches that one launch cannot serve.
    """

    def __init__(self, kv_caches: Sequence[Tensor]):
        layouts = {(c.dtype, c.device, c.stride(), c.shape[1:]) for c in kv_caches}
        if len(layouts) != 1:
            raise ValueError(f"kv_caches must share dtype, device, strides and shape: {layouts}")
        first = kv_caches[0]
        if first.dtype not in _ELEMENT:
            known = ", ".join(map(str, _ELEMENT))
            raise ValueError(f"kv_caches are {first.dtype}; commit writes {known}")
        addresses = [cache.data_ptr() for cache in kv_caches]
        _, self.kv_heads, self.block_size, self.width = first.shape
        self.num_layers = len(kv_caches)
        self._strides = first.stride()
        self._element = _ELEMENT[first.dtype]
        self._alignment = 16 if all(address % 16 == 0 for address in addresses) else 1
        slots = [cache.shape[0] * self.block_size for cache in kv_caches]
        table = list(zip(addresses, slots, strict=True))
        self._table = torch.tensor(table, dtype=torch.int64, device=first.device)

    def commit(
        self,
        staged_key: Tensor,
        staged_value: Tensor,
        slots: Tensor,
        accepted: Tensor,
        layer_metadata: Tensor,
        *,
        tokens_per_program: int | None = None,
    ) -> None:
        """`commit_staged_kv_cache_reference` to this plan's caches.

        A window with more rows than the staging buffers hold sets `ERROR_OVERFLOW` in every
        layer, and nothing is committed.
        """
        self._launch(
            staged_key,
            staged_value,
            slots,
            (accepted, None, None),
            layer_metadata,
            tokens_per_program,
        )

    def commit_counts(
        self,
        staged_key: Tensor,
        staged_value: Tensor,
        slots: Tensor,
        num_accepted: Tensor,
        draft_request: Tensor,
        draft_index: Tensor,
        layer_metadata: Tensor,
        *,
        not_drafts: int = 0,
        tokens_per_program: int | None = None,
    ) -> None:
        """`commit` with the acceptance mask folded in.

        Row i is draft `draft_index[i]` of request `draft_request[i]` and is accepted when
        `draft_index[i] < num_accepted[draft_request[i]] - not_drafts`.

        Args:
            num_accepted: [requests] int, counts on the device.
            draft_request: [num_staged] int; negative is padding and accepted by nobody.
            draft_index: [num_staged] int, counted from 0 in each request.
            not_drafts: how many of each count are no drafts: 1 for vLLM's `num_sampled`, which
                counts the corrected or bonus token too.
        """
        self._launch(
            staged_key,
            staged_value,
            slots,
            (num_accepted, draft_request, draft_index),
            layer_metadata,
            tokens_per_program,
            not_drafts,
        )

    def _launch(
        self,
        staged_key: Tensor,
        staged_value: Tensor,
        slots: Tensor,
        acceptance: tuple[Tensor, Tensor | None, Tensor | None],
        layer_metadata: Tensor,
        tokens_per_program: int | None,
        not_drafts: int = 0,
    ) -> None:
        layers, capacity, heads, key_dim = staged_key.shape
        value_dim = staged_value.shape[-1]
        if (layers, heads, key_dim + value_dim) != (self.num_layers, self.kv_heads, self.width):
            raise ValueError(
                f"staged K {tuple(staged_key.shape)} and V {tuple(staged_value.shape)} do not fit "
                f"{self.num_layers} caches of {self.kv_heads} heads and width {self.width}"
            )
        num_rows = slots.numel()
        tokens = tokens_per_program or (4 if num_rows * layers >= MANY_ROWS else 1)
        tile = tiling(num_rows, heads * max(key_dim, value_dim), tokens)
        accepted, draft_request, draft_index = acceptance
        _commit_kernel[(*tile.grid, layers)](
            staged_key,
            staged_value,
            self._table,
            slots,
            accepted,
            draft_request,
            draft_index,
            layer_metadata,
            num_rows,
            capacity,
            accepted.numel(),
            layers,
            slots.stride(0),
            accepted.stride(0),
            0 if draft_request is None else draft_request.stride(0),
            0 if draft_index is None else draft_index.stride(0),
            *layer_metadata.stride(),
            *staged_key.stride(),
            *staged_value.stride(),
            *self._strides,
            ELEMENT=self._element,
            ALIGNMENT=self._alignment,
            NOT_DRAFTS=not_drafts,
            BLOCK_SIZE=self.block_size,
            HEADS=heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            LAYERS=triton.next_power_of_2(layers),
            TOKENS=tile.tokens,
            COLUMNS=tile.columns,
            CHUNK=check_chunk(num_rows),
            num_warps=tile.num_warps,
            num_stages=1,
        )


_kept_plans: dict[object, CommitPlan] = {}
_MOST_KEPT_PLANS = 8


def commit_staged_kv_cache_triton(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
) -> None:
    """`commit_staged_kv_cache_reference` in one launch.

    The plan is kept for the next call, but finding it takes host time for each layer: whoever
    commits every window builds a `CommitPlan` and calls that.
    """
    layout = tuple((c.data_ptr(), c.dtype, c.device, c.shape, c.stride()) for c in kv_caches)
    plan = _kept_plans.get(layout)
    if plan is None:
        if len(_kept_plans) >= _MOST_KEPT_PLANS:
            _kept_plans.clear()
        plan = _kept_plans[layout] = CommitPlan(kv_caches)
    plan.commit(staged_key, staged_value, slots, accepted, layer_metadata)


@triton.jit(do_not_specialize=["num_rows", "capacity", "num_requests", "num_layers"])
def _commit_kernel(
    staged_key,
    staged_value,
    table,
    slots,
    accepted,
    draft_request,
    draft_index,
    metadata,
    num_rows,
    capacity,
    num_requests,
    num_layers,
    slots_stride,
    accepted_stride,
    draft_request_stride,
    draft_index_stride,
    metadata_layer,
    metadata_one,
    key_layer,
    key_row,
    key_head,
    key_one,
    value_layer,
    value_row,
    value_head,
    value_one,
    cache_block,
    cache_head,
    cache_offset,
    cache_one,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NOT_DRAFTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    LAYERS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    layer = tl.program_id(2).to(tl.int64)
    reports = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (layer == 0)
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = (row < num_rows) & (row < capacity)
    slot = tl.load(slots + row * slots_stride, mask=inside, other=-1).to(tl.int64)
    if draft_request is None:
        kept = tl.load(accepted + row * accepted_stride, mask=inside, other=0) != 0
    else:
        request = tl.load(draft_request + row * draft_request_stride, mask=inside, other=-1)
        index = tl.load(draft_index + row * draft_index_stride, mask=inside, other=0)
        known = (request >= 0) & (request < num_requests)
        count = tl.load(accepted + request * accepted_stride, mask=known, other=0)
        kept = known & (index < count - NOT_DRAFTS)
    kept = kept & (slot >= 0)
    if (tl.max(kept.to(tl.int32), axis=0) == 0) & (not reports):
        return  # padding and rejected drafts only

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = kept[:, None] & (column < HEADS * KEY_DIM)[None, :]
    in_value = kept[:, None] & (column < HEADS * VALUE_DIM)[None, :]
    keys = staged_key + layer * key_layer + (row.to(tl.int64) * key_row)[:, None]
    values = staged_value + layer * value_layer + (row.to(tl.int64) * value_row)[:, None]
    from_key = head_offsets(column, KEY_DIM, key_head, key_one)
    from_value = head_offsets(column, VALUE_DIM, value_head, value_one)
    key_tile = tl.load(keys + from_key[None, :], mask=in_key)
    value_tile = tl.load(values + from_value[None, :], mask=in_value)

    every = tl.arange(0, LAYERS)
    exists = every < num_layers
    per_layer = metadata + every * metadata_layer
    staged = tl.load(per_layer + _STAGED_COUNT * metadata_one, mask=exists, other=0)
    flags = tl.load(per_layer + _ERROR_FLAG * metadata_one, mask=exists, other=0)
    num_slots = tl.load(table + every * 2 + 1, mask=exists, other=0)
    count, largest = count_and_largest(slots, slots_stride, num_rows, CHUNK)
    flags |= tl.where(staged != count, _COUNT_MISMATCH, 0)
    flags |= tl.where(largest >= num_slots, _SLOT_RANGE, 0)
    flags |= tl.where(num_rows > capacity, _OVERFLOW, 0)
    if tl.max(tl.where(exists, flags, 0), axis=0) != 0:
        if reports:
            tl.store(per_layer + _ERROR_FLAG * metadata_one, flags, mask=exists)
        return

    address = tl.load(table + layer * 2).to(tl.pointer_type(ELEMENT))
    cache = tl.multiple_of(address, ALIGNMENT)
    place = (slot // BLOCK_SIZE) * cache_block + (slot % BLOCK_SIZE) * cache_offset
    to_key = head_offsets(column, KEY_DIM, cache_head, cache_one)
    to_value = head_offsets(column, VALUE_DIM, cache_head, cache_one) + KEY_DIM * cache_one
    tl.store(cache + place[:, None] + to_key[None, :], key_tile.to(ELEMENT), mask=in_key)
    tl.store(cache + place[:, None] + to_value[None, :], value_tile.to(ELEMENT), mask=in_value)
