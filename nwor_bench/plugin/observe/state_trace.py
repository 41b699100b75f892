"""What gated delta nets are given in a window, and what they return: copies for the local gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor_kernels.gated_delta.records import GatedNorm

SAMPLE = 4
"""First requests of a window that are copied: a state of each and layer is 1 to 3 MB."""


@dataclass
class StateCall:
    """What one layer was given in a window, and its outputs: tokens of the first requests."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    indices: Tensor
    accepted: Tensor
    bounds: Tensor
    norm: GatedNorm | None
    first: Tensor
    """[at most SAMPLE, HV, V, K], the states that the window starts from."""
    output: Tensor | None = None


@dataclass
class ConvolutionCall:
    """What the convolution in front of a layer was given."""

    mixed: Tensor
    """[tokens, channels]."""
    state: Tensor
    """[at most SAMPLE, ...], the convolution states that the window starts from."""


class StateTrace:
    """Calls of all gated delta nets by number. It copies on the device: a graph may capture it."""

    def __init__(self) -> None:
        self.calls: dict[int, StateCall] = {}
        self.convolutions: dict[int, ConvolutionCall] = {}

    def convolving(self, number: int, kept: Tensor, mixed: Tensor, metadata: Any) -> None:
        """A layer is about to convolve a window.

        Args:
            kept: [slots, ...], the cached convolution states.
            mixed: [tokens, channels]; the convolution may overwrite it.
            metadata: the layer's `GDNAttentionMetadata`.
        """
        indices = metadata.spec_state_indices_tensor[: metadata.num_spec_decodes]
        slots = indices[:SAMPLE, 0].long()
        few = mixed[: SAMPLE * indices.shape[1]]
        self.convolutions[number] = ConvolutionCall(few.clone(), kept[slots.clamp(min=0)])

    def given(
        self,
        number: int,
        state: Tensor,
        inputs: Sequence[Tensor],
        norm: GatedNorm | None,
    ) -> None:
        """A layer is about to verify.

        Args:
            state: [slots, HV, V, K], its cache.
            inputs: mixed, a, b, indices, accepted and bounds.
        """
        mixed, a, b, indices, accepted, bounds = inputs
        few = SAMPLE * indices.shape[1]
        column = accepted[:SAMPLE, None].long() - 1
        slots = indices[:SAMPLE].gather(1, column).flatten().long()
        if norm is not None:
            norm = norm._replace(gate=norm.gate[:few].clone())
        self.calls[number] = StateCall(
            mixed[:few].clone(),
            a[:few].clone(),
            b[:few].clone(),
            indices.clone(),
            accepted.clone(),
            bounds.clone(),
            norm,
            state[slots.clamp(min=0)],
        )

    def returned(self, number: int, output: Tensor) -> None:
        """A layer has verified."""
        call = self.calls[number]
        call.output = output[: SAMPLE * call.indices.shape[1]].clone()
