"""Latent attention of equal windows: stock attends the committed tokens, our kernel adds the rest.

vLLM's FlashAttention takes 24 us a layer at 8 requests of 1,250 tokens on an H200 and 51 at 64, our
program for all of the attention 35 and 132 (sweeps/studies/attention-tiles). So stock is called
with the lengths of what the cache holds, and is asked for its log-sum-exp, by which
`mla_tail_triton` merges the window in.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.step_inputs import StepInputs

TAIL, PROGRAM = "tail", "program"


def serves(impl: Any) -> bool:
    """True for an implementation that returns its log-sum-exp, over caches that are not fp8."""
    return (
        type(impl).__name__ == "FlashAttnMLAImpl"
        and not impl.kv_cache_dtype.startswith("fp8")
        and impl.dcp_world_size == 1
    )


@contextmanager
def returning_sums(impl: Any) -> Iterator[None]:
    """While open, `forward_mqa` of this implementation returns its log-sum-exp too."""
    asked = impl.need_to_return_lse_for_decode
    impl.need_to_return_lse_for_decode = True
    try:
        yield
    finally:
        impl.need_to_return_lse_for_decode = asked


class MlaTail:
    """Which steps stock attends in part, and their metadata; one object for all latent layers.

    Args:
        inputs: what attention reads of the step besides latents.
        max_requests: most requests of a step.
        device: where the lengths are kept.
    """

    def __init__(self, inputs: StepInputs, max_requests: int, device: torch.device):
        self._inputs = inputs
        # One tensor for all steps: captured graphs write and read it at its place.
        self._lengths = torch.empty(max_requests, dtype=torch.int32, device=device)
        self._metadata: Any = None
        self._committed_only: Any = None
        self._first_layer = -1
        self.ways: Counter[str] = Counter()
        """Layers attended by TAIL and by PROGRAM. Those of a graph count as it is captured, not as
        it is replayed."""

    def takes(self, batch: GpuWindowBatch) -> bool:
        """True for a step of nothing but equal windows; in others our own program attends."""
        is_equal = batch.tokens_per_request is not None
        self.ways[TAIL if is_equal else PROGRAM] += 1
        return is_equal

    def committed_only(self, number: int, batch: GpuWindowBatch, metadata: Any) -> Any:
        """The step's metadata with the lengths of what is committed, made by its first layer.

        FlashAttention's schedule in them was made for the whole lengths. It says into how many
        parts a context is cut; what is read follows from the lengths, and a part may be empty.

        A layer that comes again begins another forward, even with the same metadata: a captured
        forward must hold the launches that shorten the lengths.

        Args:
            number: the layer's number among the target layers.
            batch: the window, which `takes` has taken.
            metadata: the layer's own, whose `decode` is a dataclass with `seq_lens`.
        """
        if metadata is not self._metadata or number == self._first_layer:
            seq_lens, staged = self._inputs.views.seq_lens, batch.tokens_per_request
            assert staged is not None
            lengths = self._lengths[: seq_lens.shape[0]]
            # Padding of a captured shape has no tokens at all.
            torch.sub(seq_lens, staged, out=lengths).clamp_(min=0)
            decode = replace(metadata.decode, seq_lens=lengths)
            self._committed_only = replace(metadata, decode=decode)
            self._metadata, self._first_layer = metadata, number
        return self._committed_only
