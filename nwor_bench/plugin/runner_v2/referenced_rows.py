"""How many rows of a step may stay alive by reference in every layer."""

from typing import Any

import torch

from nwor_bench.plugin.staging.layers import is_latent, is_sparse

REFERENCED_PART = 64
"""By reference a window may keep 1/64 of the device's memory alive: 1.25 GB of 80.

vLLM has not seen it in its memory profile, and leaves about 8 % free by default. A step of 320
rows (64 requests with 4 drafts) of Llama-3.1-8B holds 126 MB.
"""


def memory_of(device: torch.device) -> int | None:
    """All of a CUDA device's memory in bytes; None for a CPU, where it sets no limit."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def most_referenced_rows(layers: list[Any], itemsize: int, memory_bytes: int | None) -> int | None:
    """Most rows of a step that may stay alive by reference in every layer.

    A row's K and V are views into the layer's fused QKV, all of which they keep alive; those of a
    latent layer likewise.

    Args:
        layers: vLLM's attention layers of the target, on this rank.
        itemsize: bytes of an activation.
        memory_bytes: the device's memory; None: any number of rows.
    """
    if memory_bytes is None:
        return None
    row = sum(map(_held_elements, layers))
    return memory_bytes // REFERENCED_PART // (row * itemsize)


def _held_elements(layer: Any) -> int:
    """Elements of a row that holding its K and V keeps alive."""
    impl = layer.impl
    if not is_latent(layer):
        of_keys = (impl.num_heads + impl.num_kv_heads) * impl.head_size
        return int(of_keys + impl.num_kv_heads * layer.head_size_v)
    if is_sparse(layer):
        return int(impl.head_size)  # tensors of their own
    # The normalised latent; the rotary part is a view of what both projections down gave.
    return int(impl.kv_lora_rank + (impl.q_lora_rank or 0) + impl.head_size)
