"""`nwor::stage_kv_cache`: keep the draft tokens' K/V out of the cache until they are accepted."""

import torch
from torch import Tensor

from nwor_kernels.stage.reference import stage_kv_cache_reference

__all__ = ["stage_kv_cache", "stage_kv_cache_reference"]


@torch.library.custom_op(
    "nwor::stage_kv_cache",
    mutates_args=("staged_key", "staged_value", "layer_metadata"),
    device_types="cpu",
)
def stage_kv_cache(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
) -> None:
    """See `stage_kv_cache_reference` for shapes and meaning."""
    stage_kv_cache_reference(key, value, rows, staged_key, staged_value, layer_metadata)


@stage_kv_cache.register_kernel("cuda")
def _(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
) -> None:
    """One Triton launch; Triton is imported by the first call, which only a GPU makes."""
    from nwor_kernels.stage.kernel import stage_kv_cache_triton

    stage_kv_cache_triton(key, value, rows, staged_key, staged_value, layer_metadata)


@stage_kv_cache.register_fake
def _(
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    layer_metadata: Tensor,
) -> None:
    """Nothing to infer: the operator only mutates."""
