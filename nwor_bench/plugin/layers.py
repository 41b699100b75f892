"""Which layers belong to the target, their caches, and the slots of each.

Names do not show it: an EAGLE head on a 30-layer target registers as layer 30 of the same
model, in the same KV-cache group. The runner knows after both models were loaded.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from nwor_bench.errors import BenchError
from nwor_bench.plugin.window import LayerTrace

logger = logging.getLogger("vllm.nwor_bench")


class StagingUnavailable(BenchError):
    """A model's layers cannot be staged; the message is the fallback reason."""


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache: `kv_cache` is [blocks, kv_heads, block_size, K + V width]."""

    name: str
    kv_cache: Tensor
    head_dim: int
    dtype: torch.dtype
    """Dtype of K and V before they are written."""
    slot_row: int = 0
    """The layer's row of a window's slots, if these are [groups, N]."""
    scales: tuple[Tensor, Tensor] | None = None
    """K and V scale of an fp8 cache, [1] or [kv_heads] float32."""


def is_latent(layer: Any) -> bool:
    """True for latent attention (MLA), whose cache has one row a token and no heads."""
    return getattr(layer, "kv_lora_rank", None) is not None


def causal_implementation(impl: Any) -> Any:
    """The implementation that serves windows: of a composite the causal one, else `impl`."""
    return getattr(impl, "causal_impl", impl)


def rows_of(layer: Any) -> tuple[Tensor, int]:
    """(A layer's cache as `LayerCache` has it, elements of a row that are staged as K).

    A latent layer's cache is [blocks, block_size, latent + rotary part]: one head, whose K is the
    latent and whose V is the rotary part.
    """
    if is_latent(layer):
        return layer.kv_cache.unsqueeze(1), layer.kv_lora_rank
    return layer.kv_cache, layer.head_size


def slot_index(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Index of the rows at these slots of a cache [blocks, kv_heads, block_size, K + V width]."""
    block_size = kv_cache.shape[2]  # a kernel's block may be a part of the scheduler's
    return slots // block_size, slice(None), slots % block_size


def rows_at(kv_cache: Tensor, slots: Tensor) -> Tensor:
    """[rows, kv_heads, K + V width], copied; row 0 of block 0 for a negative slot."""
    return kv_cache[slot_index(kv_cache, slots.clamp(min=0).to(kv_cache.device))]


class StagedLayers:
    """The target layers in the order of their numbers, and how they are staged.

    Args:
        capacity: most draft tokens that a window can have (requests x k).

    Raises:
        StagingUnavailable: no layers.
    """

    def __init__(self, layers: Sequence[LayerCache], capacity: int):
        if not layers:
            raise StagingUnavailable("no_target_layers")
        parts: dict[Hashable, list[LayerCache]] = {}
        for layer in layers:
            cache = layer.kv_cache
            form = (cache.shape[1:], cache.stride(), cache.dtype, layer.head_dim, layer.dtype)
            scales = tuple(scale.numel() for scale in layer.scales or ())
            parts.setdefault((*form, scales), []).append(layer)
        self.alike = list(parts.values())
        """Sets of layers that one launch can serve, of any KV-cache group."""
        self.layers = [layer for part in self.alike for layer in part]
        self.num_layers = len(layers)
        self.capacity = capacity
        self.trace: LayerTrace | None = None
        """Records the layers' inputs and outputs in a window that is checked."""

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token over all target layers."""
        caches = [layer.kv_cache for layer in self.layers]
        return sum(cache.shape[1] * cache.shape[3] * cache.element_size() for cache in caches)


Parts = TypeVar("Parts")


def set_up(make: Callable[[], Parts]) -> tuple[Parts | None, str | None]:
    """(Staging, None), or (None, the fallback reason), which an error of ours is too."""
    try:
        return make(), None
    except StagingUnavailable as unavailable:
        return None, str(unavailable)
    except Exception as fault:
        logger.exception("nwor: could not set up staging; windows are written directly")
        return None, f"setup:{type(fault).__name__}"


@dataclass(frozen=True)
class TargetLayers:
    """The layers of a runner that have a cache, by their role in staging."""

    staged: list[str] = field(default_factory=list)
    """The target's layers with K/V of their own, in the runner's order."""
    sharing: dict[str, str] = field(default_factory=dict)
    """Target layers that read another layer's K/V and write none, and that layer's name."""
    indexers: list[str] = field(default_factory=list)
    """Caches of sparse layers' indexers, small: the model writes them directly in every mode."""
    recurrent: list[str] = field(default_factory=list)
    """Target layers that keep a state instead of K/V (`states`)."""
    drafter: list[str] = field(default_factory=list)
    """The drafter's layers; they are never staged."""


@dataclass(frozen=True)
class SlotRows:
    """The target layers' rows in the runner's slot mappings.

    Slots belong to tokens, not to layers: a token has one slot in each KV-cache group, the same for
    every layer of that group.
    """

    chosen: int | slice
    """Index into [groups, tokens]: one group, or a slice from the first group with target layers
    to the last. Groups between them without target layers are included, and ignored."""
    of_layer: tuple[int, ...]
    """Each target layer's row in the chosen slots; 0 for one group."""

    @property
    def several(self) -> bool:
        """True for several KV-cache groups, whose slots are [groups, N]."""
        return isinstance(self.chosen, slice)


def attention_layers(runner: Any) -> TargetLayers:
    """The layers of this runner that have a cache, by role; prompt lookup has no drafter."""
    drafter = getattr(runner, "drafter", None)
    speculator = getattr(runner, "speculator", None)
    draft_names = set(getattr(drafter, "_draft_attn_layer_names", None) or ())
    draft_names |= set(getattr(speculator, "draft_attn_layer_names", None) or ())
    target = TargetLayers()
    for group in runner.kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            layer = runner.compilation_config.static_forward_context[name]
            shared = getattr(layer, "kv_sharing_target_layer_name", None)
            if name in draft_names:
                target.drafter.append(name)
            elif shared is not None:
                target.sharing[name] = shared
            elif is_indexer(layer):
                target.indexers.append(name)
            elif is_recurrent(layer):
                target.recurrent.append(name)
            else:
                target.staged.append(name)
    return target


def layers_alone_in_their_memory(runner: Any, names: Sequence[str]) -> set[str]:
    """Layers to whose cache nothing writes but these layers, alike in shape.

    Layers of several KV-cache groups may lie in the same memory, each in blocks of its own.
    """
    context = runner.compilation_config.static_forward_context
    every = [
        (name, cache)
        for group in runner.kv_cache_config.kv_cache_groups
        for name in group.layer_names
        for cache in _tensors(context[name].kv_cache)
    ]
    undisturbed = set(names)
    for name, cache in every:
        for other, beside in every:
            alike = cache.shape == beside.shape and cache.stride() == beside.stride()
            same_place = cache.data_ptr() == beside.data_ptr()
            if alike and (other in undisturbed or not same_place):
                continue  # other memory, perhaps between its blocks
            if same_place or (not alike and _overlap(cache, beside)):
                undisturbed.discard(name)
    return undisturbed.intersection(names)


def _tensors(cache: Any) -> list[Tensor]:
    """A recurrent layer has a list of states."""
    return [cache] if isinstance(cache, Tensor) else list(cache)


def _overlap(one: Tensor, other: Tensor) -> bool:
    (start, end), (first, last) = (
        (cache.data_ptr(), cache.data_ptr() + _extent(cache)) for cache in (one, other)
    )
    return start < last and first < end


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return elements * tensor.element_size() if tensor.numel() else 0


def is_sparse(layer: Any) -> bool:
    """True for latent attention over positions that an indexer selects."""
    impl = getattr(layer, "impl", None)
    return is_latent(layer) and bool(getattr(impl, "is_sparse", False))


def is_indexer(layer: Any) -> bool:
    """True for the cache of a sparse layer's indexer, which has no attention of its own."""
    kinds = [kind.__name__ for kind in type(layer).__mro__]
    return getattr(layer, "impl", None) is None and any("Indexer" in kind for kind in kinds)


def is_recurrent(layer: Any) -> bool:
    """True for Mamba, gated delta net, short convolution and their like."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase  # slow to import

    return isinstance(layer, MambaBase)


def slot_rows(runner: Any, names: Sequence[str]) -> SlotRows:
    """The rows of these target layers in the runner's slot mappings.

    Raises:
        StagingUnavailable: none of them is in a KV-cache group.
    """
    groups = runner.kv_cache_config.kv_cache_groups
    group_of = {name: n for n, group in enumerate(groups) for name in group.layer_names}
    if not names:
        raise StagingUnavailable("no_target_layers")
    numbers = [group_of[name] for name in names]
    first, last = min(numbers), max(numbers)
    if first == last:
        return SlotRows(first, (0,) * len(names))
    return SlotRows(slice(first, last + 1), tuple(number - first for number in numbers))
