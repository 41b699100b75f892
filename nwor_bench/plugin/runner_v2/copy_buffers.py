"""Where staging by copy keeps drafts' K/V on a GPU: one block of memory for all target layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.plugin.staging.layers import LayerCache
from nwor_kernels.commit.sources import StagedSources


@dataclass(frozen=True)
class CopyBuffers:
    """Rows for the most drafts that a window can have, in every target layer.

    Attributes:
        memory: [elements], all keys and then all values, so that one access-policy window of the
            L2 cache covers both.
        keys: [layers, capacity, kv_heads, head_dim], a view of it.
        values: [layers, capacity, kv_heads, value_head_dim], another.
        metadata: [layers, 2] int32, what `stage_kv_cache` says of each layer.
        sources: where a commit finds the rows.
    """

    memory: Tensor
    keys: Tensor
    values: Tensor
    metadata: Tensor
    sources: StagedSources

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
