"""The byte model: DRAM bytes that one verification step is predicted to move. Nothing is measured.

What the drafts' K/V costs is in `strategies`; here are the step around it and the shares of it.
Left out, alike in every strategy: other activations, logits, the drafter, the sampler. A real
step moves more, so a share of the step is the most that it can be. All bytes are those of one
tensor-parallel rank.
"""

from dataclasses import dataclass

from nwor_bench.models.shape import ModelShape
from nwor_bench.models.strategies import DIRECT, Strategy

CACHE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
CACHE_BITS |= {"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}
"""Size in bits of an element in the KV cache."""

WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
"""Size in bits of a matrix element; the scales of quantised ones (a few per cent) are left out."""


@dataclass(frozen=True)
class Workload:
    """One step: `requests` requests with `context` cached tokens and `draft_tokens` drafts each.

    `acceptance` is accepted drafts over drafts, a fraction.
    """

    requests: int
    context: int
    draft_tokens: int
    acceptance: float
    ranks: int = 1

    @property
    def staged(self) -> int:
        """Drafts of the window, N."""
        return self.requests * self.draft_tokens

    @property
    def accepted(self) -> float:
        """Accepted drafts on average, A."""
        return self.staged * self.acceptance

    @property
    def tokens(self) -> int:
        """Tokens that the step computes: the drafts and one certain token a request."""
        return self.staged + self.requests


@dataclass(frozen=True)
class Moved:
    """Predicted DRAM bytes of a strategy in one window."""

    read: float
    written: float

    @property
    def total(self) -> float:
        """Bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class ByteModel:
    """A model with the element sizes of its cache, matrices and activations, in bits."""

    shape: ModelShape
    cache_bits: int
    weight_bits: int
    activation_bits: int

    def cache_row(self, ranks: int) -> float:
        """Bytes that one token puts into the caches of all layers."""
        return self._row_elements(ranks) * self.cache_bits / 8

    def activation_row(self, ranks: int) -> float:
        """Bytes of the same values as activations, before the cache's type is applied."""
        return self._row_elements(ranks) * self.activation_bits / 8

    def moved(self, strategy: Strategy, load: Workload) -> Moved:
        """What the strategy moves for the window's drafts."""
        totals = {True: 0.0, False: 0.0}
        for move in strategy.moves:
            row = self.activation_row if move.as_activations else self.cache_row
            totals[move.reads] += move.rows(load.staged, load.accepted) * row(load.ranks)
        return Moved(read=totals[True], written=totals[False])

    def saved(self, strategy: Strategy, load: Workload) -> float:
        """Bytes that the strategy moves less than direct; negative where it moves more."""
        return self.moved(DIRECT, load).total - self.moved(strategy, load).total

    def most_saved(self, load: Workload) -> float:
        """Bytes that no strategy can exceed: the rejected drafts' rows, never written."""
        return (load.staged - load.accepted) * self.cache_row(load.ranks)

    def break_even(self, strategy: Strategy) -> float | None:
        """Acceptance below which the strategy moves fewer bytes than direct; None: at none.

        Its bytes are a N + b A, direct's d N; a N + b A < d N says A / N < (d - a) / b. By
        reference in one type: a = 0, b = 2, d = 1: below 1/2. For b < 0 (log and restore) the
        sign turns and acceptance would have to exceed (d - a) / b = 2, which it cannot.
        """
        fixed, slope = self._coefficients(strategy)
        direct, _ = self._coefficients(DIRECT)
        if slope <= 0 or fixed >= direct:
            return None
        return min(1.0, (direct - fixed) / slope)

    def weights_read(self, load: Workload) -> float:
        """Bytes of matrices read once in a step, lm_head included.

        Experts: as many as the step's tokens are expected to touch. lm_head, routers and the
        rows looked up in the embedding keep the activations' type, as quantised checkpoints do.
        """
        experts = self.shape.experts
        touched = 0.0 if experts is None else experts.expected_distinct(load.tokens)
        blocks = self.shape.block_parameters(touched, load.ranks) * self.weight_bits
        embedded = load.tokens * self.shape.hidden / load.ranks
        plain = (self.shape.unquantised_parameters(load.ranks) + embedded) * self.activation_bits
        return (blocks + plain) / 8

    def context_read(self, load: Workload) -> float:
        """Bytes of cached K/V that attention reads: each request's context once a layer.

        A request's queries share one pass; sliding layers read no more than their window.
        """
        tokens = sum(min(load.context, layer.window or load.context) for layer in self.shape.layers)
        row = self.shape.cache_row_elements(load.ranks) * self.cache_bits / 8
        return load.requests * tokens * row

    def first_tokens_written(self, load: Workload) -> float:
        """Bytes of the certain first tokens' K/V, written directly in every strategy."""
        return load.requests * self.cache_row(load.ranks)

    def step(self, load: Workload) -> float:
        """All predicted bytes of a step of stock vLLM."""
        drafts = self.moved(DIRECT, load).total
        rest = self.weights_read(load) + self.context_read(load) + self.first_tokens_written(load)
        return rest + drafts

    def share(self, strategy: Strategy, load: Workload) -> float:
        """The strategy's saving as a fraction of the step: the ceiling of its effect.

        If the step is bound by DRAM bandwidth alone, its time falls by this fraction.
        """
        return self.saved(strategy, load) / self.step(load)

    def _row_elements(self, ranks: int) -> int:
        return len(self.shape.layers) * self.shape.cache_row_elements(ranks)

    def _coefficients(self, strategy: Strategy) -> tuple[int, int]:
        """a and b of a N + b A, in bits an element."""
        bits = {True: self.activation_bits, False: self.cache_bits}
        fixed = sum(move.staged * bits[move.as_activations] for move in strategy.moves)
        slope = sum(move.accepted * bits[move.as_activations] for move in strategy.moves)
        return fixed, slope
