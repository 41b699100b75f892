"""What gated delta nets are given in a window, and what they return: copies for the local gate."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor_bench.plugin.state_layers import StateLayer

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


class StateTrace:
    """Calls of all gated delta nets by number. It copies on the device: a graph may capture it."""

    def __init__(self) -> None:
        self.calls: dict[int, StateCall | None] = {}
        """None: what the layer was given was not seen."""

    def given(
        self,
        number: int,
        layer: StateLayer,
        inputs: tuple[Tensor, Tensor, Tensor],
        metadata: Any,
        gate: Tensor | None = None,
    ) -> None:
        """vLLM calls a layer with a window; nothing of ours has seen the arguments yet.

        Args:
            inputs: mixed, a and b; the convolution may overwrite mixed.
            metadata: the layer's `GDNAttentionMetadata`.
        """
        requests = metadata.num_spec_decodes
        indices = metadata.spec_state_indices_tensor[:requests].clone()
        accepted = metadata.num_accepted_tokens[:requests].clone()
        few = slice(min(SAMPLE * indices.shape[1], metadata.num_actual_tokens))
        column = accepted[:SAMPLE, None].long() - 1
        slots = indices[:SAMPLE].gather(1, column).flatten().long()
        mixed, a, b = (each[few].clone() for each in inputs)
        kept = layer.layer.kv_cache[0]
        self.calls[number] = StateCall(
            mixed,
            a,
            b,
            gate=None if gate is None else gate[few].clone(),
            indices=indices,
            accepted=accepted,
            bounds=metadata.spec_query_start_loc[: requests + 1].clone(),
            convolution=kept[indices[:SAMPLE, 0].long().clamp(min=0)],
            first=layer.state[slots.clamp(min=0)],
        )

    def verified(self, number: int, mixed: Tensor, output: Tensor) -> None:
        """A layer has verified a window that its convolution has made `mixed` of."""
        call = self.calls.setdefault(number, None)
        if call is not None:
            tokens = slice(len(call.mixed))
            call.convolved, call.output = mixed[tokens].clone(), output[tokens].clone()
