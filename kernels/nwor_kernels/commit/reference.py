"""Commit: write the accepted staged tokens to every layer's cache. Torch reference."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES, quantize_e4m3
from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_FLAG,
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
    STAGED_COUNT,
)


class LayerCaches(NamedTuple):
    """Where a commit writes."""

    kv_caches: Sequence[Tensor]
    """One tensor a layer, [blocks, kv_heads, block_size, head_dim + value_head_dim], K then V, all
    of one block size; uint8 and float8_e4m3fn caches are written quantised (`quantize_e4m3`)."""
    k_scales: Sequence[Tensor] | None = None
    """One float32 tensor a layer, [1] or [kv_heads]; fp8 caches only."""
    v_scales: Sequence[Tensor] | None = None
    slot_rows: Sequence[int] | None = None
    """The row of the slots that each layer writes to; None: slots are [N]."""


def commit_windows_reference(
    sources: tuple[Sequence[Tensor], Sequence[Tensor]],
    caches: LayerCaches,
    slots: Tensor,
    accepted: Tensor,
    errors: Tensor,
    *,
    rows: Tensor | None = None,
    layer_metadata: Tensor | None = None,
    written: Tensor | None = None,
) -> None:
    """Write source row i (or `rows[i]`) of every layer to slot `slots[i]` if `accepted[i]`.

    A bad slot or row, padding apart, stops the commit in every layer, even if it is not
    accepted.

    Args:
        sources: K, one tensor a layer, [rows, kv_heads, head_dim]; V likewise, [rows, kv_heads,
            value_head_dim].
        slots: [N] int64, block * block_size + offset, or [groups, N] with slot rows; negative is
            padding and never indexed.
        accepted: [N] bool.
        errors: [layers] int32, flags are or-ed in.
        rows: [N] int, the row's place in the sources; negative is never written. None: row
            i is the i-th.
        layer_metadata: [layers, 2] int32 as staging wrote it; a wrong count or a
            flag in any layer stops the commit.
        written: [layers] int32; the rows stored in each layer are added.
    """
    kv_caches, k_scales, v_scales, slot_rows = caches
    keys, values = sources
    block_size = kv_caches[0].shape[2]
    of_layer = [slots] * len(kv_caches) if slot_rows is None else list(slots[list(slot_rows)])
    in_order = torch.arange(slots.shape[-1], device=slots.device)
    source = in_order if rows is None else rows.long()
    num_rows = min(len(tensor) for tensor in (*keys, *values))
    flags = torch.zeros_like(errors)
    if layer_metadata is not None:
        flags |= layer_metadata[:, ERROR_FLAG]
    for layer, (kv_cache, slot) in enumerate(zip(kv_caches, of_layer, strict=True)):
        real = slot >= 0
        if layer_metadata is not None and layer_metadata[layer, STAGED_COUNT] != real.sum():
            flags[layer] |= ERROR_COUNT_MISMATCH
        if bool((source[real] >= num_rows).any()):
            flags[layer] |= ERROR_OVERFLOW if rows is None else ERROR_ROW_RANGE
        if bool((slot >= kv_cache.shape[0] * block_size).any()):
            flags[layer] |= ERROR_SLOT_RANGE
    errors |= flags
    if bool(flags.any()):
        return
    head_dim = keys[0].shape[-1]
    for layer, (kv_cache, slot) in enumerate(zip(kv_caches, of_layer, strict=True)):
        kept = (accepted & (slot >= 0) & (source >= 0)).nonzero(as_tuple=True)[0]
        block, offset = slot[kept] // block_size, slot[kept] % block_size
        for tensors, scales, columns in (
            (keys, k_scales, slice(head_dim)),
            (values, v_scales, slice(head_dim, None)),
        ):
            new = tensors[layer][source[kept]]
            if kv_cache.dtype in E4M3_CACHE_DTYPES:
                assert scales is not None
                new = quantize_e4m3(new, scales[layer]).view(torch.uint8)
                kv_cache.view(torch.uint8)[block, :, offset, columns] = new
            else:
                kv_cache[block, :, offset, columns] = new.to(kv_cache.dtype)
        if written is not None:
            written[layer] += kept.numel()
