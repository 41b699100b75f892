"""`nwor::commit_staged_kv_cache`: accepted drafts into every target layer's cache at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_kernels.commit.reference import commit_staged_kv_cache_reference

__all__ = ["commit_staged_kv_cache", "commit_staged_kv_cache_reference"]


@torch.library.custom_op(
    "nwor::commit_staged_kv_cache",
    mutates_args=("kv_caches", "layer_metadata", "written"),
    device_types="cpu",
)
def commit_staged_kv_cache(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
    slot_rows: Sequence[int] | None = None,
    written: Tensor | None = None,
) -> None:
    """See `commit_staged_kv_cache_reference` for shapes and meaning."""
    commit_staged_kv_cache_reference(
        staged_key, staged_value, kv_caches, slots, accepted, layer_metadata, slot_rows, written
    )


@commit_staged_kv_cache.register_kernel("cuda")
def _(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
    slot_rows: Sequence[int] | None = None,
    written: Tensor | None = None,
) -> None:
    """One Triton launch; Triton is imported by the first call, which only a GPU makes."""
    from nwor_kernels.commit.operator import commit_staged_kv_cache_triton

    commit_staged_kv_cache_triton(
        staged_key, staged_value, kv_caches, slots, accepted, layer_metadata, slot_rows, written
    )


@commit_staged_kv_cache.register_fake
def _(
    staged_key: Tensor,
    staged_value: Tensor,
    kv_caches: Sequence[Tensor],
    slots: Tensor,
    accepted: Tensor,
    layer_metadata: Tensor,
    slot_rows: Sequence[int] | None = None,
    written: Tensor | None = None,
) -> None:
    """Nothing to infer: the operator only mutates."""
