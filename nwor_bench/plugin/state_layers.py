"""The gated delta nets of a target: their cached states, shapes and records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import StagingUnavailable, TargetLayers


@dataclass(frozen=True)
class StateLayer:
    """One gated delta net of the target."""

    name: str
    layer: Any
    """vLLM's `QwenGatedDeltaNetAttention`."""
    group: int
    """Number of its KV-cache group among those of such layers."""
    state: Tensor
    """[slots, value heads, value width, key width], any strides."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state."""
        return self.state[0].numel() * self.state.element_size()


def shape_of(layer: StateLayer) -> dict[str, int]:
    """Heads and head sizes of this rank, as `gated_delta` names them."""
    _, value_heads, value_dim, key_dim = layer.state.shape
    own = layer.layer
    return {
        "key_heads": own.num_k_heads // own.tp_size,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def token_bytes(layers: Sequence[StateLayer], dtype: torch.dtype) -> int:
    """Bytes of the records of one token: 20.6 KB a layer in Qwen3-Next."""
    shape = shape_of(layers[0])
    keys = shape["key_heads"] * shape["key_dim"] * dtype.itemsize
    return len(layers) * (keys + 4 * shape["value_heads"] * (shape["value_dim"] + 1))


def find_states(
    runner: Any, target: TargetLayers, view: Callable[[Tensor], Tensor]
) -> list[StateLayer]:
    """The target's gated delta nets, in the runner's order; none without recurrent layers.

    Args:
        view: a layer's cached states as [slots, value heads, value width, key width].

    Raises:
        StagingUnavailable: stock keeps the states of all; the message is the reason.
    """
    from nwor_bench.plugin import refusals  # it imports vLLM

    context = runner.compilation_config.static_forward_context
    layers = {name: context[name] for name in target.recurrent}
    reason = refusals.of_states(list(layers.values()), runner.vllm_config)
    if reason is not None:
        raise StagingUnavailable(reason)
    groups = runner.kv_cache_config.kv_cache_groups
    own = [[name for name in group.layer_names if name in layers] for group in groups]
    return [
        StateLayer(name, layers[name], number, view(layers[name].kv_cache[1]))
        for number, names in enumerate(filter(None, own))
        for name in names
    ]
