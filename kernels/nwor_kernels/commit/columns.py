"""What a commit's tables say of each layer beside its cache: its scales, its row of slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_kernels.fp8 import E4M3_CACHE_DTYPES


def slot_row_column(
    slot_rows: Sequence[int] | None, num_layers: int, device: torch.device
) -> tuple[int, Tensor | None]:
    """(Rows of slots that layers name, [layers] int64 on the device); (0, None) for one group.

    Raises:
        ValueError: not one row a layer.
    """
    if slot_rows is None:
        return 0, None
    if len(slot_rows) != num_layers or min(slot_rows) < 0:
        raise ValueError(f"{num_layers} layers need a row of slots each, not {slot_rows}")
    return max(slot_rows) + 1, torch.tensor(slot_rows, dtype=torch.int64, device=device)


def scale_column(
    name: str, scales: Sequence[Tensor] | None, cache: Tensor, num_layers: int
) -> tuple[int, list[int]]:
    """(Scales of a layer, address of each layer's); 0 where the cache is not quantised.

    Args:
        name: k or v.
        scales: one tensor a layer.
        cache: the first layer's, [blocks, kv_heads, block_size, width].
        num_layers: how many layers the plan has.

    Raises:
        ValueError: scales for a cache without any, or not those that an fp8 cache needs.
    """
    if cache.dtype not in E4M3_CACHE_DTYPES:
        if scales is not None:
            raise ValueError(f"{name}_scales are for fp8 caches; kv_caches are {cache.dtype}")
        return 0, [0] * num_layers
    kv_heads = cache.shape[1]
    layouts = {(s.dtype, s.device, s.numel(), s.is_contiguous()) for s in scales or ()}
    if (
        scales is None
        or len(scales) != num_layers
        or len(layouts) != 1
        or not any((torch.float32, cache.device, n, True) in layouts for n in (1, kv_heads))
    ):
        raise ValueError(
            f"an fp8 cache needs {name}_scales, one contiguous float32 tensor a layer with 1 "
            f"or {kv_heads} elements on {cache.device}: {layouts or scales}"
        )
    return scales[0].numel(), [scale.data_ptr() for scale in scales]
