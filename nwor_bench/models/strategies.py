"""Strategies for writing drafts' K/V to the cache, as rows read from and written to DRAM.

A window stages N drafts (requests x k); A of them are accepted. A row is one token's K/V in all
layers. DRAM reads and writes count alike. Rows moved by each strategy:

- direct: write each draft's row to the cache: N.
- copy, spilled from L2: write each row to a staging buffer (N), read the accepted rows (A), write
  them to the cache (A): N + 2A, never less than direct.
- copy, kept in L2: staging never reaches DRAM; write the accepted rows: A.
- by reference: keep the K/V activations; read the accepted rows (A), write them (A): 2A.

Cache rows have the cache's element size; staged rows have the activations'. With an fp8 cache and
bf16 activations a staged row is twice as large, so by reference pays below 1/3 acceptance instead
of 1/2.

Assumption in favour of "by reference": keeping the activations costs no more DRAM writes than in
stock vLLM.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """staged x N + accepted x A rows that are read from or written to DRAM."""

    what: str
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

    name: str
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
    "direct",
    "direct (stock vLLM)",
    (Move("write each draft to the cache", reads=False, staged=1),),
    launches_per_layer=1,
    launches_per_window=0,
    writes_drafts_in_place=True,
)
COPY_SPILLED = Strategy(
    "copy_spilled",
    "copy, spilled from L2",
    (
        Move("copy each draft to staging", reads=False, staged=1, as_activations=True),
        Move("read accepted from staging", reads=True, accepted=1, as_activations=True),
        Move("write accepted to the cache", reads=False, accepted=1),
    ),
    launches_per_layer=1,
    launches_per_window=1,
)
COPY_IN_L2 = Strategy(
    "copy_in_l2",
    "copy, kept in L2",
    (Move("write accepted to the cache", reads=False, accepted=1),),
    launches_per_layer=1,
    launches_per_window=1,
)
BY_REFERENCE = Strategy(
    "reference",
    "by reference",
    (
        Move("read accepted activations", reads=True, accepted=1, as_activations=True),
        Move("write accepted to the cache", reads=False, accepted=1),
    ),
    launches_per_layer=0,
    launches_per_window=1,
)
STRATEGIES = (DIRECT, COPY_SPILLED, COPY_IN_L2, BY_REFERENCE)
