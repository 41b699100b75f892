"""Where staging by copy keeps drafts' K/V on a GPU: one block of memory for all target layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.plugin.staging.layers import LayerCache
from nwor_kernels.commit.sources import StagedSources

ALIGNMENT = 256
"""Bytes that each set's part of the memory is a multiple of, for wide loads and stores."""


@dataclass(frozen=True)
class CopyBuffers:
    """Rows for the most drafts that a window can have, in every layer of one set."""

    keys: Tensor
    """[layers, capacity, kv_heads, head_dim]"""
    values: Tensor
    """[layers, capacity, kv_heads, value_head_dim]"""
    metadata: Tensor
    """[layers, 2] int32, written by `stage_kv_cache`."""
    sources: StagedSources
    """Where a commit finds the rows."""

    @classmethod
    def num_bytes(cls, layers: Sequence[LayerCache], capacity: int) -> int:
        """Bytes of memory that these layers need, a multiple of ALIGNMENT."""
        _, kv_heads, _, width = layers[0].kv_cache.shape
        needed = len(layers) * capacity * kv_heads * width * layers[0].dtype.itemsize
        return -(-needed // ALIGNMENT) * ALIGNMENT

    @classmethod
    def create(cls, layers: Sequence[LayerCache], capacity: int, memory: Tensor) -> "CopyBuffers":
        """Buffers of the layers' dtype (not their caches', which may be quantised).

        Args:
            layers: layers of one shape.
            capacity: rows of each.
            memory: [`num_bytes`] uint8, which holds all keys and then all values.
        """
        first = layers[0]
        _, kv_heads, _, width = first.kv_cache.shape
        rows = (len(layers), capacity, kv_heads)
        per_width = len(layers) * capacity * kv_heads
        elements = memory.view(first.dtype)
        cut = per_width * first.head_dim
        keys = elements[:cut].view(*rows, first.head_dim)
        values = elements[cut : per_width * width].view(*rows, width - first.head_dim)
        metadata = torch.zeros(len(layers), 2, dtype=torch.int32, device=memory.device)
        return cls(keys, values, metadata, StagedSources(list(keys), list(values)))
