"""The attention heads of a layer that caches K and V, and what they take. Pure arithmetic."""

from dataclasses import dataclass


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
