"""Commit: write the accepted staged tokens to every layer's cache. Torch reference."""

from collections.abc import Sequence

from torch import Tensor

from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_FLAG,
    ERROR_SLOT_RANGE,
    STAGED_COUNT,
)


def commit_staged_kv_cache_reference(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
) -> None:
    """Write staged row i to slot `slots[i]` of every layer where `accepted[i]`.

    All layers or none: every layer is checked before the first write. A layer whose staged
    count is not the window's, or whose error flag is set, stops the commit, and its flag
    says so; the caller then writes the window directly.

    Args:
        staged_key: [layers, capacity, kv_heads, head_dim].
        staged_value: [layers, capacity, kv_heads, value_head_dim].
        kv_caches: one tensor a layer, [blocks, kv_heads, block_size, head_dim +
            value_head_dim], K then V in the last dimension; written in place, any strides;
            all of one block size.
        slots: [num_staged] int64, block * block_size + offset, the same for every layer;
            a negative slot is padding and is never indexed.
        accepted: [num_staged] bool.
        layer_metadata: [layers, 2] int32, (staged count, error flags); flags are added here.
    """
    num_staged = int((slots >= 0).sum())
    block_size = kv_caches[0].shape[2]
    last_slot = int(slots.max()) if slots.numel() else -1
    mismatch = layer_metadata[:, STAGED_COUNT] != num_staged
    layer_metadata[mismatch, ERROR_FLAG] |= ERROR_COUNT_MISMATCH
    for layer, kv_cache in enumerate(kv_caches):
        if last_slot >= kv_cache.shape[0] * block_size:
            layer_metadata[layer, ERROR_FLAG] |= ERROR_SLOT_RANGE
    if bool(layer_metadata[:, ERROR_FLAG].any()):
        return
    rows = (accepted & (slots >= 0)).nonzero(as_tuple=True)[0]
    block, offset = slots[rows] // block_size, slots[rows] % block_size
    head_dim = staged_key.shape[-1]
    for layer, kv_cache in enumerate(kv_caches):
        kv_cache[block, :, offset, :head_dim] = staged_key[layer, rows].to(kv_cache.dtype)
        kv_cache[block, :, offset, head_dim:] = staged_value[layer, rows].to(kv_cache.dtype)
