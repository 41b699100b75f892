"""Staging on a CPU: buffers of one K and one V row a draft token in each target layer."""

import torch
from torch import Tensor

import nwor_kernels
from nwor_bench.plugin.staging.layers import LayerCache, StagingUnavailable
from nwor_kernels.metadata import ERROR_FLAG, error_names


class StagingBuffers:
    """Holds a window's K/V outside the cache.

    Args:
        layers: the target layers, all of one shape and dtype.
        capacity: most draft tokens that a window can have (requests x k).

    Raises:
        StagingUnavailable: layers of differing shapes, which one buffer cannot hold.
    """

    def __init__(self, layers: list[LayerCache], capacity: int):
        if not layers:
            raise StagingUnavailable("no_target_layers")
        shapes = {(c.kv_cache.shape, c.head_dim, c.dtype, c.kv_cache.dtype) for c in layers}
        if len(shapes) != 1:
            raise StagingUnavailable("layer_shapes_differ")
        self.layers = layers
        self.num_layers = len(layers)
        self.capacity = capacity
        self._kv_caches = [layer.kv_cache for layer in layers]
        _, kv_heads, _, width = layers[0].kv_cache.shape
        head_dim, dtype = layers[0].head_dim, layers[0].dtype
        device = layers[0].kv_cache.device
        shape = (self.num_layers, capacity, kv_heads)
        self.key = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.value = torch.empty(*shape, width - head_dim, dtype=dtype, device=device)
        self.metadata = torch.zeros(self.num_layers, 2, dtype=torch.int32, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token over all target layers."""
        cache = self._kv_caches[0]
        return self.num_layers * cache.shape[1] * cache.shape[3] * cache.element_size()

    def reset(self) -> None:
        """Forget the last window."""
        self.metadata.zero_()

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        """Copy the rows into the layer's buffers; returns the error words, or ''."""
        expected = (self.key.shape[2:], self.value.shape[2:])
        if (key.shape[1:], value.shape[1:]) != expected:
            return "kv_shape"
        nwor_kernels.stage_kv_cache(
            key, value, rows, self.key[layer], self.value[layer], self.metadata[layer]
        )
        return error_names(int(self.metadata[layer, ERROR_FLAG]))

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Write accepted rows to all layers at once; returns the error words, or ''."""
        nwor_kernels.commit_staged_kv_cache(
            self.key, self.value, self._kv_caches, slots, accepted, self.metadata
        )
        problems = 0
        for flags in self.metadata[:, ERROR_FLAG].tolist():
            problems |= flags
        return error_names(problems)

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        """Write every staged row of these layers, as stock vLLM would have done at once."""
        for layer in layers:
            staged = slice(0, slots.numel())
            write_kv_cache(
                self.key[layer, staged], self.value[layer, staged], self._kv_caches[layer], slots
            )


def write_kv_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write each row with a slot >= 0 to the paged cache, in place.

    Args:
        key: [num_tokens, kv_heads, head_dim].
        value: [num_tokens, kv_heads, value_head_dim].
        kv_cache: [blocks, kv_heads, block_size, head_dim + value_head_dim].
        slots: [num_tokens] int64, block * block_size + offset; negative: not written.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    block_size = kv_cache.shape[2]
    block, offset = slots[rows] // block_size, slots[rows] % block_size
    both = torch.cat([key[rows], value[rows]], dim=-1)
    kv_cache[block, :, offset] = both.to(kv_cache.dtype)
