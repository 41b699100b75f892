"""The gated delta nets of a target: their cached states, shapes and records, and for the local gate
copies of what they are given in a window, and what they return."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import StagingUnavailable, TargetLayers
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.state_slots import one_slot


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
    cache_group: int = 0
    """Number of its KV-cache group among all."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's state."""
        return self.state[0].numel() * self.state.element_size()


def shape_of(layer: StateLayer) -> dict[str, int]:
    """Heads and head sizes of this rank, as `gated_delta` names them."""
    _, value_heads, value_dim, key_dim = layer.state.shape
    net = layer.layer
    return {
        "key_heads": net.num_k_heads // net.tp_size,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }


def token_bytes(layers: Sequence[StateLayer], dtype: torch.dtype) -> int:
    """Bytes of the records of one token: 20.6 KB a layer in Qwen3-Next."""
    shape = shape_of(layers[0])
    keys = shape["key_heads"] * shape["key_dim"] * dtype.itemsize
    return len(layers) * (keys + 4 * shape["value_heads"] * (shape["value_dim"] + 1))


def strange_spec(spec: Any, drafts: int) -> str | None:
    """The fallback reason of a layer's `MambaSpec` in which other states are kept than are known:
    a convolution's and a recurrent one, in a slot for each of `drafts` + 1 tokens."""
    if (tensors := len(spec.shapes)) != 2:
        return reasons.unsupported_states(f"{tensors}_tensors")
    slots = 1 + spec.num_speculative_blocks
    return None if slots == 1 + drafts else reasons.unsupported_states(f"{slots}_slots")


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
    config = runner.vllm_config
    drafts = 0 if one_slot(config.additional_config) else config.num_speculative_tokens
    reason = refusals.of_states(list(layers.values()), config)
    specs = (layer.get_kv_cache_spec(config) for layer in layers.values())
    reason = reason or next(filter(None, (strange_spec(spec, drafts) for spec in specs)), None)
    if reason is not None:
        raise StagingUnavailable(reason)
    groups = runner.kv_cache_config.kv_cache_groups
    names_by_group = [[name for name in group.layer_names if name in layers] for group in groups]
    with_states = [number for number, names in enumerate(names_by_group) if names]
    return [
        StateLayer(name, layers[name], number, view(layers[name].kv_cache[1]), cache_group)
        for number, cache_group in enumerate(with_states)
        for name in names_by_group[cache_group]
    ]


SAMPLE = 4
"""First requests of a window that are copied: a state of each and layer is 1 to 3 MB."""


@dataclass
class StateCall:
    """What vLLM gave one layer in a window, and what became of it: tokens of the first requests."""

    mixed: Tensor
    """[tokens, channels], in front of the convolution."""
    a: Tensor
    b: Tensor
    gate: Tensor | None
    """The gated norm's, if it is the layer's method's part."""
    indices: Tensor
    accepted: Tensor
    bounds: Tensor
    convolution: Tensor
    """[at most SAMPLE, ...], the convolution states that the window starts from."""
    first: Tensor
    """[at most SAMPLE, HV, V, K], the states that the window starts from."""
    convolved: Tensor | None = None
    """[tokens, channels], what our kernel was given."""
    output: Tensor | None = None
    rings: Tensor | None = None
    """[at most SAMPLE] int32, the requests' rings; None without rings."""
    current: Callable[[Tensor, Tensor | None], Tensor] | None = None
    """`WindowStates.current` of the layer; None: the cached states are compared."""


class StateTrace:
    """Calls of all gated delta nets by number. It copies on the device: a graph may capture it."""

    def __init__(self) -> None:
        self.calls: dict[int, StateCall | None] = {}
        """None: what the layer was given was not seen."""

    def given(
        self,
        number: int,
        states: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        metadata: Any,
        gate: Tensor | None = None,
    ) -> None:
        """vLLM calls a layer with a window; nothing of ours has seen the arguments yet.

        Args:
            states: the `WindowStates`.
            inputs: mixed, a and b; the convolution may overwrite mixed.
            metadata: the layer's `GDNAttentionMetadata`.
        """
        requests = metadata.num_spec_decodes
        indices = metadata.spec_state_indices_tensor[:requests].clone()
        accepted = metadata.num_accepted_tokens[:requests].clone()
        few = slice(min(SAMPLE * indices.shape[1], metadata.num_actual_tokens))
        column = accepted[:SAMPLE, None].long() - 1
        slots = indices[:SAMPLE].gather(1, column).flatten().long()
        mixed, a, b = (tensor[few].clone() for tensor in inputs)
        kept, current = states.layers[number].layer.kv_cache[0], partial(states.current, number)
        rings = None if states.rings is None else states.rings.records.of_row[: len(slots)].clone()
        self.calls[number] = StateCall(
            mixed,
            a,
            b,
            gate=None if gate is None else gate[few].clone(),
            indices=indices,
            accepted=accepted,
            bounds=metadata.spec_query_start_loc[: requests + 1].clone(),
            convolution=kept[indices[:SAMPLE, 0].long().clamp(min=0)],
            first=current(slots.clamp(min=0), rings),
            rings=rings,
            current=current,
        )

    def verified(self, number: int, mixed: Tensor, output: Tensor) -> None:
        """A layer has verified a window that its convolution has made `mixed` of."""
        call = self.calls.setdefault(number, None)
        if call is not None:
            tokens = slice(len(call.mixed))
            call.convolved, call.output = mixed[tokens].clone(), output[tokens].clone()
