"""A decoder's shape for the byte model: layers, heads, experts. Pure arithmetic.

Parameter counts cover matrices; norms and biases (under 0.1 %) are left out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from nwor_bench.models.recurrent import RecurrentLayers, RecurrentState


@dataclass(frozen=True)
class Heads:
    """Heads of one layer's attention.

    Attributes:
        queries: query heads.
        kv: K/V heads.
        dim: size of a query and of a key.
        value_dim: size of a value.
    """

    queries: int
    kv: int
    dim: int
    value_dim: int

    def fits_ranks(self, ranks: int) -> bool:
        """True if vLLM can split them: query heads divide evenly, K/V heads divide or repeat."""
        return self.queries % ranks == 0 and (self.kv % ranks == 0 or ranks % self.kv == 0)

    def cache_elements(self, ranks: int) -> int:
        """Cache elements of one token on one of `ranks` ranks, which has at least one K/V head."""
        return max(1, self.kv // ranks) * (self.dim + self.value_dim)

    def parameters(self, hidden: int, ranks: int, *, gated: bool) -> float:
        """Elements of the matrices of queries, keys, values and output on one rank.

        `gated`: queries bring a gate of the output with them.
        """
        queries, outputs = (1 + gated) * self.dim, self.value_dim
        return hidden * (self.queries / ranks * (queries + outputs) + self.cache_elements(ranks))


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2 and later); the cache holds one latent row."""

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Indexer:
    """Selects the positions that sparse latent attention reads (DeepSeek V3.2, GLM-5).

    Attributes:
        heads, head_dim: of its queries; its keys have one head.
        selected: most positions of the context that a query attends.
        layers: layers with an indexer; the others use the selection of the last one before them.
    """

    heads: int
    head_dim: int
    selected: int
    layers: int

    @property
    def key_bytes(self) -> int:
        """Bytes of a cached key: fp8, and a float32 scale for each 128 elements."""
        return self.head_dim + self.head_dim // 128 * 4


@dataclass(frozen=True)
class Experts:
    """A mixture-of-experts MLP; `shared_width` is the width of the shared expert."""

    count: int
    per_token: int
    width: int
    shared_width: int = 0

    def expected_distinct(self, tokens: int) -> float:
        """Expected number of distinct experts that `tokens` tokens use in one layer.

        Assumes uniform, independent routing: all tokens miss a given expert with probability
        (1 - per_token / count) ** tokens. Real routers are skewed and use fewer experts, so this
        overestimates the weights read.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True)
class Layer:
    """One decoder layer.

    Attributes:
        window: its sliding window.
        sparse: True if its MLP has experts.
        attends: False if it has no K/V.
        recurrent: True if it has a recurrent state.
        has_mlp: False for a layer that is only a mixer, as in Nemotron-H.
        heads: its own, if they differ from the model's.
    """

    window: int | None = None
    sparse: bool = False
    attends: bool = True
    recurrent: bool = False
    has_mlp: bool = True
    heads: Heads | None = None


PLAIN = Layer()
"""A layer with the model's heads."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape.

    Attributes:
        dtype: dtype of the activations.
        weight_bits: bits of a matrix element; None if the quantisation config does not say.
        state: that of each recurrent layer.
        indexer: that of sparse latent layers.
        value_dim: size of a value, if it differs from a key's; None with `mla`.
        gated_attention: True if queries bring a gate of the output with them.
        mlp_matrices: matrices of an MLP: gate, up and down, or two without a gate.
        plain_attention: a quantised checkpoint leaves attention in the activations' dtype.
    """

    model_type: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    layers: tuple[Layer, ...]
    dtype: str
    weight_bits: float | None
    tied_embeddings: bool = False
    mla: Mla | None = None
    experts: Experts | None = None
    state: RecurrentState | None = None
    gated_attention: bool = False
    mlp_matrices: int = 3
    indexer: Indexer | None = None
    value_dim: int | None = None
    plain_attention: bool = False

    @property
    def attending(self) -> tuple[Layer, ...]:
        """The layers that have K/V."""
        return tuple(layer for layer in self.layers if layer.attends)

    @cached_property
    def alike(self) -> Mapping[Layer, int]:
        """How many layers there are of each kind; a model has few kinds."""
        return Counter(self.layers)

    def row_elements(self, ranks: int = 1) -> int:
        """Cache elements of one token in all layers, on one of `ranks` ranks."""
        return sum(
            number * self.cache_row_elements(ranks, layer)
            for layer, number in self.alike.items()
            if layer.attends
        )

    @property
    def recurrent(self) -> RecurrentLayers | None:
        """The recurrent layers; None if there are none."""
        if self.state is None:
            return None
        return RecurrentLayers(sum(layer.recurrent for layer in self.layers), self.state)

    def heads_of(self, layer: Layer = PLAIN) -> Heads:
        """A layer's heads."""
        value_dim = self.value_dim or self.head_dim
        return layer.heads or Heads(self.heads, self.kv_heads, self.head_dim, value_dim)

    def fits_ranks(self, ranks: int) -> bool:
        """True if vLLM can split every layer."""
        if self.state is not None and self.state.heads % ranks:
            return False
        if self.mla is not None:
            return self.heads % ranks == 0
        return all(self.heads_of(layer).fits_ranks(ranks) for layer in self.alike if layer.attends)

    def cache_row_elements(self, ranks: int = 1, layer: Layer = PLAIN) -> int:
        """Cache elements of one token in one layer, on one of `ranks` ranks.

        K and V of the rank's KV heads (at least one head); with MLA one latent row on every rank.
        """
        if self.mla is not None:
            return self.mla.kv_rank + self.mla.rope_dim
        return self.heads_of(layer).cache_elements(ranks)

    def attention_parameters(self, ranks: int = 1, layer: Layer = PLAIN) -> float:
        """Parameters of one layer's attention matrices on one rank.

        Heads are split over ranks; MLA's down-projections and repeated KV heads are not.
        """
        if self.mla is None:
            gated = self.gated_attention
            return self.heads_of(layer).parameters(self.hidden, ranks, gated=gated)
        heads = self.heads / ranks
        mla = self.mla
        query_dim = mla.nope_dim + mla.rope_dim
        if mla.q_rank is None:
            query = self.hidden * heads * query_dim
        else:
            query = self.hidden * mla.q_rank + mla.q_rank * heads * query_dim
        latent = self.hidden * (mla.kv_rank + mla.rope_dim)
        expand = mla.kv_rank * heads * (mla.nope_dim + mla.v_dim)
        return query + latent + expand + heads * mla.v_dim * self.hidden

    def block_parameters(self, touched_experts: float, ranks: int = 1) -> float:
        """Parameters of all layers' attention, recurrent mixers and MLPs on one rank.

        Each sparse layer counts `touched_experts` experts and the shared expert.
        """
        dense = self._mlp(self.mlp_width) / ranks
        sparse = 0.0
        if self.experts is not None:
            routed = touched_experts * self._mlp(self.experts.width)
            sparse = (routed + self._mlp(self.experts.shared_width)) / ranks
        mixer = 0.0 if self.state is None else self.state.parameters / ranks
        return self._indexer_parameters() + self._over_layers(
            lambda layer: (
                layer.attends * self.attention_parameters(ranks, layer)
                + layer.recurrent * mixer
                + layer.has_mlp * (sparse if layer.sparse else dense)
            )
        )

    def all_attention_parameters(self, ranks: int = 1) -> float:
        """Parameters of all layers' attention matrices on one rank."""
        return self._over_layers(
            lambda layer: self.attention_parameters(ranks, layer) if layer.attends else 0.0
        )

    def _indexer_parameters(self) -> float:
        """Every rank has all of the indexers' heads."""
        indexer, mla = self.indexer, self.mla
        if indexer is None or mla is None:
            return 0.0
        queries = (mla.q_rank or self.hidden) * indexer.heads * indexer.head_dim
        return indexer.layers * (queries + self.hidden * (indexer.head_dim + indexer.heads))

    def unquantised_parameters(self, ranks: int = 1) -> float:
        """Parameters on one rank that quantised checkpoints do not quantise: lm_head, routers."""
        router = 0 if self.experts is None else self.hidden * self.experts.count
        routers = self._over_layers(lambda layer: router if layer.sparse else 0)
        return self.vocab * self.hidden / ranks + routers

    def parameters(self) -> int:
        """Parameters of the whole model, to compare with the published count."""
        experts = 0 if self.experts is None else self.experts.count
        embedding = 0 if self.tied_embeddings else self.vocab * self.hidden
        return round(self.block_parameters(experts) + self.unquantised_parameters()) + embedding

    def _mlp(self, width: int) -> int:
        return self.mlp_matrices * self.hidden * width

    def _over_layers(self, parameters: Callable[[Layer], float]) -> float:
        return sum(number * parameters(layer) for layer, number in self.alike.items())
