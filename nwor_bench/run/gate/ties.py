"""Measure gaps between two tokens, and their movement, on the live engine in mode off."""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from nwor_bench.analysis.parity.ties import (
    ErrorScale,
    Place,
    PlaceVerdict,
    TopLogprobs,
    error_scale,
    gap_between,
)
from nwor_bench.analysis.parity.tokens import Tokens
from nwor_bench.engine.preflight import TOP
from nwor_bench.engine.protocol import Engine
from nwor_bench.errors import EngineError
from nwor_bench.records.types import Cell

MAX_POSITIONS = 128
"""Output positions of the gate's block on which the error scale is measured."""

CPU_POSITIONS = 32
"""Output positions on a CPU, where 128 take minutes."""


class TieCheck:
    """Checks differing tokens against mode off's own log probabilities.

    Each prefix runs in three batch shapes: all prefixes together, with a full prefill; together,
    with their context from the prefix cache, so that only the last partial block is computed, as
    few tokens as a window has; and from the prefix cache, one at a time.

    The error scale is measured once, at the first difference: the gate's block is decoded again in
    mode off, then up to `MAX_POSITIONS` of its positions run in those shapes, and with attention
    moved by one rounding step. At 8 requests that is one gate batch and 180 steps of a few tokens,
    about the time of four gate batches. An engine without a prefix cache prefills every prefix
    again.

    Args:
        engine: a started engine; its modes change.
        baseline: off x off.
        gate: gives the prompts of the gate's block.
        max_new_tokens: output tokens of each request of the gate's block.
        ignore_eos: as in the gate.
        positions: output positions on which the error scale is measured, at most.
        same_kernel: no cell has another attention kernel than mode off.
    """

    def __init__(
        self,
        engine: Engine,
        baseline: Cell,
        gate: Callable[[], Tokens],
        max_new_tokens: int,
        ignore_eos: bool,
        positions: int = MAX_POSITIONS,
        same_kernel: bool = False,
    ):
        self._positions, self._same_kernel = positions, same_kernel
        self._engine = engine
        self._baseline = baseline
        self._gate = gate
        self._max_new_tokens = max_new_tokens
        self._ignore_eos = ignore_eos
        self._scale: ErrorScale | None = None
        self.spent_s = 0.0
        """Time spent in the engine, in seconds."""

    @property
    def measured(self) -> ErrorScale | None:
        """The error scale; None before the first difference."""
        return self._scale

    def check(
        self, prompts: Tokens, reference: Tokens, places: Sequence[Place]
    ) -> list[PlaceVerdict]:
        """A verdict for each place, in their order; the engine is left in mode off."""
        began = perf_counter()
        self._engine.set_modes(self._baseline)
        scale = self._scale = self._scale or self._measure_scale()
        prefixes = list(
            dict.fromkeys(
                (*prompts[place.request], *reference[place.request][: place.position])
                for place in places
            )
        )
        shapes = self._shapes(prefixes)
        by_prefix = {prefix: tops for prefix, *tops in zip(prefixes, *shapes, strict=True)}
        verdicts = []
        for place in places:
            prefix = (*prompts[place.request], *reference[place.request][: place.position])
            gaps = tuple(
                gap_between(top, place.reference, place.token) for top in by_prefix[prefix]
            )
            verdicts.append(PlaceVerdict(place, gaps, scale))
        self.spent_s += perf_counter() - began
        return verdicts

    def go_on(
        self, cell: Cell, prompts: Tokens, reference: Tokens, starts: Mapping[int, int]
    ) -> dict[int, tuple[int, ...]]:
        """The rest of each request in the cell's modes, after `starts` tokens of the reference."""
        began = perf_counter()
        self._engine.set_modes(cell)
        outputs = self._engine.decode_greedily(
            [(*prompts[request], *reference[request][:start]) for request, start in starts.items()],
            [len(reference[request]) - start for request, start in starts.items()],
            ignore_eos=self._ignore_eos,
        )
        self.spent_s += perf_counter() - began
        return {
            request: tuple(output.token_ids)
            for request, output in zip(starts, outputs, strict=True)
        }

    def _measure_scale(self) -> ErrorScale:
        """The error scale from mode off's own windows and from attention moved by one rounding
        step, both against the batch shapes."""
        prompts = self._gate()
        decoded = self._engine.decode_greedily(
            prompts, [self._max_new_tokens] * len(prompts), ignore_eos=self._ignore_eos, top=TOP
        )
        outputs = [output.token_ids for output in decoded]
        spots = spread([len(output) for output in outputs], self._positions)
        prefixes = [(*prompts[r], *outputs[r][:at]) for r, at in spots]
        asked = self._shapes(prefixes)
        nudged = self._next_tokens(prefixes, nudged=True)  # the next batch empties the prefix cache
        try:
            return error_scale(
                [decoded[r].top[at] for r, at in spots],
                nudged,
                asked,
                [top for output in decoded for top in output.top],
                same_kernel=self._same_kernel,
            )
        except ValueError as error:
            raise EngineError.at(
                "the gate cannot measure the error of mode off", str(error)
            ) from error

    def _shapes(self, prefixes: Tokens) -> list[list[TopLogprobs]]:
        """The likeliest next tokens of each prefix, in each batch shape."""
        return [
            self._next_tokens(prefixes),
            self._next_tokens(prefixes, keep_prefix_cache=True),
            [top for p in prefixes for top in self._next_tokens([p], keep_prefix_cache=True)],
        ]

    def _next_tokens(
        self, prefixes: Tokens, keep_prefix_cache: bool = False, nudged: bool = False
    ) -> list[TopLogprobs]:
        """The likeliest next tokens of each prefix, from one batch."""
        outputs = self._engine.decode_greedily(
            prefixes,
            [1] * len(prefixes),
            ignore_eos=self._ignore_eos,
            top=TOP,
            keep_prefix_cache=keep_prefix_cache,
            nudged=nudged,
        )
        return [output.top[0] for output in outputs]


def spread(lengths: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Up to `most` (request, position) spread evenly over outputs of these lengths."""
    every = [(request, at) for request, length in enumerate(lengths) for at in range(length)]
    count = min(most, len(every))
    return [every[i * len(every) // count] for i in range(count)]
