"""The states of a target's recurrent layers, as vLLM lays them out."""

from collections.abc import Iterable
from math import prod
from typing import Any

from vllm.model_executor.layers.mamba.abstract import MambaBase


def recurrent_facts(runner: Any, drafter_layers: Iterable[str]) -> dict[str, Any] | None:
    """Number of the target's recurrent layers, and a request's states on this rank, in bytes.

    None without such layers. vLLM names the convolution's inputs first, then the recurrent state;
    a layer with one of the two alone is told by its state's dimensions.
    """
    context = runner.compilation_config.static_forward_context
    drafters = set(drafter_layers)
    layers = [
        layer
        for name, layer in context.items()
        if isinstance(layer, MambaBase) and name not in drafters
    ]
    if not layers:
        return None
    sizes = [_bytes_of(layer) for layer in layers]
    return {
        "layers": len(layers),
        "state_bytes": sum(state for state, _ in sizes),
        "conv_bytes": sum(conv for _, conv in sizes),
    }


def _bytes_of(layer: MambaBase) -> tuple[int, int]:
    """Bytes of the recurrent state and of the convolution's inputs."""
    parts = [
        (shape, prod(shape) * dtype.itemsize)
        for shape, dtype in zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
    ]
    if len(parts) == 1:
        (shape, size), *_ = parts
        return (size, 0) if len(shape) > 2 else (0, size)
    return parts[1][1], parts[0][1]
