"""Moves attention's output by one rounding step, to measure its effect on K/V.

Two correct attention kernels add in different orders and round at different places, so their
outputs differ by about a rounding step. Stock attention against itself does not show that: its
decode and its prefill may add in the same order, bit for bit. The error that a step of that size
leaves in each layer's K/V is measured in mode off, with this on during a prefill.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import is_latent, is_sparse
from nwor_bench.plugin.patching import Patch, PatchSet, Wrapper

SEED = 20
"""Seed of the signs: every run moves the same elements the same way."""

FLOAT32_STEPS = 16
"""Steps of float32: sums of a thousand terms and fast exponentials err by several, while below
float32 the rounding of the output is larger than both."""


LATENT_ARGUMENTS = ("query", "key", "value", "kv_cache", "attn_metadata", "output")
"""First arguments of latent attention; other attention has the layer before them."""

PREFILL_ARGUMENTS = (*LATENT_ARGUMENTS[:5], "k_scale", "output")
"""First arguments of a sparse layer's prefill."""


class AttentionNudge:
    """Wraps the attention of target layers while it is on."""

    def __init__(self, layers: list[Any]):
        self._layers = layers
        self._patches: PatchSet | None = None
        self._signs: torch.Generator | None = None

    def switch(self, on: bool) -> None:
        """Start or stop; call it between batches, in mode off."""
        if self._patches is not None:
            self._patches.undo()
            self._patches = None
        if on:
            self._signs = None
            patches = PatchSet([p for layer in self._layers for p in self._patches_of(layer)])
            patches.apply()
            self._patches = patches

    def _patches_of(self, layer: Any) -> list[Patch]:
        if is_sparse(layer):  # calls its implementation itself, or the layer's method around it
            return [
                Patch(layer.impl, "forward_mqa", self._wrap_selected),
                Patch(layer.impl, "forward_mha", self._wrap(PREFILL_ARGUMENTS)),
            ]
        if is_latent(layer):  # its implementation has no one method that does all rows
            return [Patch(layer, "forward_impl", self._wrap(LATENT_ARGUMENTS))]
        return [Patch(layer.impl, "forward", self._wrap(("layer", *LATENT_ARGUMENTS)))]

    def _wrap_selected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_mqa(*args: Any, **kwargs: Any) -> Any:
            output, sums = original(*args, **kwargs)
            self._move(output)
            return output, sums

        return forward_mqa

    def _wrap(self, names: Sequence[str]) -> Wrapper:
        """Wraps a method with these first arguments."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def attend(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                if given.get("attn_metadata") is not None:
                    self._move(given["output"])
                return result

            return attend

        return wrap

    def _move(self, output: Tensor) -> None:
        if self._signs is None:
            self._signs = torch.Generator(output.device).manual_seed(SEED)
        step = torch.finfo(output.dtype).eps
        if output.dtype is torch.float32:
            step *= FLOAT32_STEPS
        up = torch.empty_like(output).bernoulli_(0.5, generator=self._signs)
        output.mul_(1 + step * (2 * up - 1))
