"""Moves attention's output by one rounding step, to measure its effect on K/V.

Two correct attention kernels add in different orders and round at different places, so their
outputs differ by about a rounding step. Stock attention against itself does not show that: its
decode and its prefill may add in the same order, bit for bit. The error that a step of that size
leaves in each layer's K/V is measured in mode off, with this on during a prefill.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import is_latent, is_sparse
from nwor_bench.plugin.patching import Patch, PatchSet

SEED = 20
"""Seed of the signs: every run moves the same elements the same way."""

FLOAT32_STEPS = 16
"""Steps of float32: sums of a thousand terms and fast exponentials err by several, while below
float32 the rounding of the output is larger than both."""


class AttentionNudge:
    """Wraps the attention of target layers while it is on.

    Args:
        layers: vLLM's attention modules of the target.
    """

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
            patches = PatchSet([each for layer in self._layers for each in self._patches_of(layer)])
            patches.apply()
            self._patches = patches

    def _patches_of(self, layer: Any) -> list[Patch]:
        if is_sparse(layer):  # calls its implementation itself, or the layer's method around it
            return [
                Patch(layer.impl, "forward_mqa", self._wrap_selected),
                Patch(layer.impl, "forward_mha", self._wrap_dense),
            ]
        if is_latent(layer):  # its implementation has no one method that does all rows
            return [Patch(layer, "forward_impl", self._wrap_latent)]
        return [Patch(layer.impl, "forward", self._wrap)]

    def _wrap_selected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_mqa(*args: Any, **kwargs: Any) -> Any:
            output, sums = original(*args, **kwargs)
            self._move(output)
            return output, sums

        return forward_mqa

    def _wrap_dense(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_mha(*args: Any, output: Tensor, **kwargs: Any) -> Any:
            result = original(*args, output=output, **kwargs)
            self._move(output)
            return result

        return forward_mha

    def _wrap_latent(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_impl(
            query: Tensor,
            latent: Tensor,
            key_pe: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            step = (query, latent, key_pe, kv_cache, attn_metadata, output)
            result = original(*step, *args, **kwargs)
            if attn_metadata is not None:
                self._move(output)
            return result

        return forward_impl

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = original(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
            if attn_metadata is not None:
                self._move(output)
            return result

        return forward

    def _move(self, output: Tensor) -> None:
        """Every element up or down, in place."""
        if self._signs is None:
            self._signs = torch.Generator(output.device).manual_seed(SEED)
        step = torch.finfo(output.dtype).eps
        if output.dtype is torch.float32:
            step *= FLOAT32_STEPS
        up = torch.empty_like(output).bernoulli_(0.5, generator=self._signs)
        output.mul_(1 + step * (2 * up - 1))
