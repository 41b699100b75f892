"""The byte model: predicted DRAM bytes of one verification step. Nothing is measured.

A window stages N drafts (requests x k), of which A are accepted. A row is one token's K/V in all
layers. DRAM reads and writes count alike. Rows that each strategy moves for the drafts:

- direct: write each draft's row to the cache: N.
- copy, spilled from L2: write each row to a staging buffer (N), read the accepted rows (A), write
  them to the cache (A): N + 2A, never less than direct.
- by reference: keep the K/V activations; read the accepted rows (A), write them (A): 2A. Keeping
  them is assumed to cost no more DRAM writes than in stock vLLM.

Staged rows have the activations' element size: with bf16 activations and an fp8 cache "by
reference" pays below 1/3 acceptance instead of 1/2.

The rest of the step leaves out other activations, logits, the drafter and the sampler. A real step
moves more bytes, so every share of the step is an upper bound. All bytes are per tensor-parallel
rank.

Memory that a model with recurrent layers reserves is predicted as vLLM's cache configuration
computes it. States and K/V stand in one pool of equal pages. A cache block has as many tokens as
make their K/V in one layer as large as a state's slot, and slots are padded to that size. A request
holds 1 + k slots in each recurrent layer (`MambaSpec.num_speculative_blocks` = k), and whole blocks
of K/V. Left out: that vLLM fills up its groups of layers to one size, activations and graphs.
"""

from dataclasses import dataclass, replace
from math import ceil

from nwor_bench.models.recurrent import STAGED_KINDS, Moved, RecurrentLayers
from nwor_bench.models.shape import ModelShape

CACHE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
CACHE_BITS |= {"fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}
"""Size in bits of an element in the KV cache."""


KERNEL_BLOCK, LATENT_BLOCK = 16, 128
"""Tokens of which a cache block is a multiple: FlashAttention's, and with latent rows."""

MEMORY_SHARE = 0.92
"""vLLM's default `gpu_memory_utilization`."""

MAX_GPUS = 64
"""Most GPUs that `gpus_needed` tries."""


@dataclass(frozen=True)
class Move:
    """staged x N + accepted x A rows, read from or written to DRAM."""

    reads: bool
    staged: int = 0
    accepted: int = 0
    as_activations: bool = False

    def rows(self, staged: float, accepted: float) -> float:
        """Rows moved in a window with that many staged and accepted drafts."""
        return self.staged * staged + self.accepted * accepted


@dataclass(frozen=True)
class Strategy:
    """A strategy: its moves, and the kernel launches that drafts need."""

    label: str
    moves: tuple[Move, ...]
    launches_per_layer: int
    launches_per_window: int
    writes_drafts_in_place: bool = False

    @property
    def staging(self) -> str:
        """The label for use in a sentence: `by reference`, `by copy, kept in L2`."""
        return "by " + self.label.removeprefix("by ")

    def launches(self, layers: int) -> tuple[int, int]:
        """Fewest and most launches per window.

        The fewest are those of the drafts. If drafts are not written in place, the stock write of
        each request's certain first token may add one launch per layer.
        """
        drafts = layers * self.launches_per_layer + self.launches_per_window
        return drafts, drafts + (0 if self.writes_drafts_in_place else layers)


DIRECT = Strategy(
    "direct (stock vLLM)",
    (Move(reads=False, staged=1),),
    launches_per_layer=1,
    launches_per_window=0,
    writes_drafts_in_place=True,
)
COPY_SPILLED = Strategy(
    "copy, spilled from L2",
    (
        Move(reads=False, staged=1, as_activations=True),
        Move(reads=True, accepted=1, as_activations=True),
        Move(reads=False, accepted=1),
    ),
    launches_per_layer=1,
    launches_per_window=1,
)
BY_REFERENCE = Strategy(
    "by reference",
    (Move(reads=True, accepted=1, as_activations=True), Move(reads=False, accepted=1)),
    launches_per_layer=0,
    launches_per_window=1,
)


@dataclass(frozen=True)
class Workload:
    """One verification step; `context` and `draft_tokens` are per request.

    `acceptance` is accepted drafts over drafts, a fraction; `ranks` are tensor-parallel.
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
        """Mean number of accepted drafts, A."""
        return self.staged * self.acceptance

    @property
    def tokens(self) -> int:
        """Tokens that the step computes: the drafts, and one certain token per request."""
        return self.staged + self.requests


@dataclass(frozen=True)
class ByteModel:
    """A model's shape, with the sizes of its cache, matrix and activation elements in bits."""

    shape: ModelShape
    cache_bits: int
    weight_bits: float
    activation_bits: int

    def cache_row(self, ranks: int) -> float:
        """Bytes of one token's K/V in the caches of all layers."""
        return self.shape.row_elements(ranks) * self.cache_bits / 8

    def activation_row(self, ranks: int) -> float:
        """Bytes of one token's K/V of all layers as activations."""
        return self.shape.row_elements(ranks) * self.activation_bits / 8

    def moved(self, strategy: Strategy, load: Workload) -> Moved:
        """Bytes that the strategy moves for the window's drafts."""
        totals = {True: 0.0, False: 0.0}
        for move in strategy.moves:
            row = self.activation_row if move.as_activations else self.cache_row
            totals[move.reads] += move.rows(load.staged, load.accepted) * row(load.ranks)
        return Moved(read=totals[True], written=totals[False])

    def most_saved(self, load: Workload) -> float:
        """Upper bound of the bytes that any strategy saves: the rejected drafts' rows."""
        return (load.staged - load.accepted) * self.cache_row(load.ranks)

    def weights_read(self, load: Workload) -> float:
        """Bytes of the matrices, each read once in a step, lm_head included.

        Counts as many experts as the step's tokens are expected to touch. lm_head, routers and
        embedding rows have the activations' dtype, as in quantised checkpoints.
        """
        experts = self.shape.experts
        touched = 0.0 if experts is None else experts.expected_distinct(load.tokens)
        return self._weights(touched, load.tokens * self.shape.hidden, load.ranks)

    def weights(self, ranks: int) -> float:
        """Bytes of all weights on one rank, of the dtypes that `weights_read` counts."""
        experts, shape = self.shape.experts, self.shape
        embedding = 0 if shape.tied_embeddings else shape.vocab * shape.hidden
        return self._weights(0 if experts is None else experts.count, embedding, ranks)

    def _weights(self, experts: float, embedding: float, ranks: int) -> float:
        plain = self.shape.unquantised_parameters(ranks) + embedding / ranks
        blocks = self.shape.block_parameters(experts, ranks) * self.weight_bits
        if self.shape.plain_attention:
            attention = self.shape.all_attention_parameters(ranks)
            blocks += attention * (self.activation_bits - self.weight_bits)
        return (blocks + plain * self.activation_bits) / 8

    def context_read(self, load: Workload) -> float:
        """Bytes of cached K/V that attention reads: each request's context once per layer.

        The queries of a request share one pass; sliding layers read at most their window, sparse
        ones at most one query's selection.
        """
        indexer = self.shape.indexer
        most = load.context if indexer is None else min(load.context, indexer.selected)
        elements = sum(
            number
            * min(most, layer.window or most)
            * self.shape.cache_row_elements(load.ranks, layer)
            for layer, number in self.shape.alike.items()
            if layer.attends
        )
        return load.requests * elements * self.cache_bits / 8

    def first_tokens_written(self, load: Workload) -> float:
        """Bytes of the certain first tokens' K/V, which every strategy writes directly."""
        return load.requests * self.cache_row(load.ranks)

    def step(self, load: Workload) -> float:
        """All predicted bytes of a step in stock vLLM."""
        drafts = self.moved(DIRECT, load).total
        rest = self.weights_read(load) + self.context_read(load) + self.first_tokens_written(load)
        return rest + drafts + self.states_moved(load) + self.indexer_keys_moved(load)

    def indexer_keys_moved(self, load: Workload) -> float:
        """Bytes of sparse layers' indexer keys: the context's read, the step's tokens' written.

        Every strategy writes them directly, so that they save nothing.
        """
        indexer = self.shape.indexer
        if indexer is None:
            return 0.0
        keys = load.requests * load.context + load.tokens
        return float(keys * indexer.layers * indexer.key_bytes)

    def states_moved(self, load: Workload) -> float:
        """Bytes of recurrent states that stock vLLM reads and writes; 0 without such layers."""
        recurrent = self.shape.recurrent
        if recurrent is None:
            return 0.0
        return recurrent.moved(load.requests, load.draft_tokens, load.ranks).total

    def states_saved(self, load: Workload) -> float:
        """Bytes that a window saves by writing one state a request; 0 if they are not staged."""
        recurrent = self.shape.recurrent
        if recurrent is None or recurrent.state.kind not in STAGED_KINDS:
            return 0.0
        staged = recurrent.staged(load.requests, load.draft_tokens, load.accepted, load.ranks)
        return self.states_moved(load) - staged.total


def cache_block(model: ByteModel, states: RecurrentLayers, load: Workload) -> int:
    """Tokens of a cache block, as vLLM's `_align_hybrid_block_size` chooses them."""
    unit = KERNEL_BLOCK if model.shape.mla is None else LATENT_BLOCK
    page = states.page_bytes(load.draft_tokens, load.ranks)
    return unit * ceil(page / (unit * _row_of_layer(model, load)))


def padded_page(model: ByteModel, states: RecurrentLayers, load: Workload) -> float:
    """Bytes of a page: one layer's slot, or a block of its K/V."""
    return cache_block(model, states, load) * _row_of_layer(model, load)


def reserved_states(model: ByteModel, states: RecurrentLayers, load: Workload, slots: int) -> float:
    """Bytes of one request's states, with that many slots a layer."""
    return slots * states.count * padded_page(model, states, load)


def requests_that_fit(
    memory: int, model: ByteModel, load: Workload, slots: int | None = None
) -> int:
    """Requests whose states and K/V (context and window) fit beside the weights; 0 if none does.

    `slots` are states of a request and layer: without a number one a token, as stock vLLM; with one
    slot a request has a ring of records too.
    """
    states, tokens = model.shape.recurrent, load.context + load.draft_tokens + 1
    if states is None:
        request = _cache_of_request(model, tokens, load.ranks)
    else:
        request = reserved_states(model, states, load, slots or load.draft_tokens + 1)
        blocks = ceil(tokens / cache_block(model, states, load)) * len(model.shape.attending)
        request += blocks * padded_page(model, states, load)
        if slots == 1:
            request += states.ring_bytes(load.draft_tokens, load.ranks)
    return max(0, int((memory * MEMORY_SHARE - model.weights(load.ranks)) // request))


def gpus_needed(memory: int, model: ByteModel, load: Workload) -> int | None:
    """GPUs of that memory that hold the weights and all requests of a step, by powers of two from
    the load's ranks on; None if MAX_GPUS do not."""
    ranks = load.ranks
    while ranks <= MAX_GPUS:
        split = replace(load, ranks=ranks)
        fits = model.shape.fits_ranks(ranks)
        if fits and requests_that_fit(memory, model, split) >= load.requests:
            return ranks
        ranks *= 2
    return None


def _cache_of_request(model: ByteModel, tokens: int, ranks: int) -> float:
    """Bytes of a request's K/V in whole blocks; a layer with a window keeps only that."""
    shape = model.shape
    unit = KERNEL_BLOCK if shape.mla is None else LATENT_BLOCK
    elements = sum(
        number
        * unit
        * ceil(min(tokens, layer.window or tokens) / unit)
        * shape.cache_row_elements(ranks, layer)
        for layer, number in shape.alike.items()
        if layer.attends
    )
    keys = 0 if shape.indexer is None else tokens * shape.indexer.layers * shape.indexer.key_bytes
    return elements * model.cache_bits / 8 + keys


def _row_of_layer(model: ByteModel, load: Workload) -> float:
    """Bytes of one token's K/V in one layer."""
    return model.shape.cache_row_elements(load.ranks) * model.cache_bits / 8
