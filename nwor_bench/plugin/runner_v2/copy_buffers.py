"""Where staging by copy keeps drafts' K/V on a GPU: one block of memory for all target layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.plugin.staging.layers import LayerCache
from nwor_kernels.commit.sources import StagedSources


@dataclass(frozen=True)
class CopyBuffers:
    """Rows for the most drafts that a window can have, in every target layer."""

    memory: Tensor
    """[elements], all keys and then all values, so that one access-policy window covers both."""
    keys: Tensor
    """[layers, capacity, kv_heads, head_dim], a view of `memory`."""
    values: Tensor
    """[layers, capacity, kv_heads, value_head_dim], another view."""
    metadata: Tensor
    """[layers, 2] int32, written by `stage_kv_cache`."""
    sources: StagedSources
    """Where a commit finds the rows."""

    @classmethod
    def create(cls, layers: Sequence[LayerCache], capacity: int) -> "CopyBuffers":
        """Buffers of the layers' dtype (not their caches', which may be quantised)."""
        first = layers[0]
        _, kv_heads, _, width = first.kv_cache.shape
        rows = (len(layers), capacity, kv_heads)
        per_width = len(layers) * capacity * kv_heads
        device = first.kv_cache.device
        memory = torch.empty(per_width * width, dtype=first.dtype, device=device)
        cut = per_width * first.head_dim
        keys = memory[:cut].view(*rows, first.head_dim)
        values = memory[cut:].view(*rows, width - first.head_dim)
        metadata = torch.zeros(len(layers), 2, dtype=torch.int32, device=device)
        return cls(memory, keys, values, metadata, StagedSources(list(keys), list(values)))
