"""The ways for drafts' K/V to get into the cache, as moves of rows across the DRAM's border.

Source: the byte model of the project's design, DRAM reads and writes counted alike. A window
stages N drafts (requests x k), A of which are accepted. One row is what one token puts into the
caches of all layers. Each strategy is the list of its moves of rows, and its bytes are their sum:

- direct: each draft's row is written to the cache: N.
- copy, spilled from L2: each row is written to a staging buffer (N); the commit reads the
  accepted ones (A) and writes them to the cache (A): N + 2A, never less than direct.
- copy, kept in L2: staging never reaches DRAM; the accepted rows are written: A.
- by reference: the K/V activations are held instead of copied; the commit reads the accepted
  ones (A) and writes them (A): 2A.
- log and restore: the old row under each draft is read (N) and logged (N), the draft's row
  written (N); of the N - A rejected ones the log is read and written back: 5N - 2A.

A row in the cache has the cache's element size; a held or copied row the activations'. With an
fp8 cache below bf16 activations a held row is thus read at twice the size, and by reference pays
below 1/3 instead of 1/2.

That the GEMM's own write of the held activations costs no more DRAM than in stock vLLM is assumed
in favour of "by reference".
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """staged x N + accepted x A rows that cross the DRAM's border, in one direction."""

    what: str
    reads: bool
    staged: int = 0
    accepted: int = 0
    as_activations: bool = False

    def rows(self, staged: float, accepted: float) -> float:
        """Rows moved in a window of that many staged and accepted drafts."""
        return self.staged * staged + self.accepted * accepted


@dataclass(frozen=True)
class Strategy:
    """A way for drafts' K/V to get into the cache, with the kernel launches that drafts need."""

    name: str
    label: str
    moves: tuple[Move, ...]
    launches_per_layer: int
    launches_per_window: int
    writes_drafts_in_place: bool = False

    @property
    def staging(self) -> str:
        """For a sentence: staging `by reference`, `by copy, kept in L2`."""
        return "by " + self.label.removeprefix("by ")

    def launches(self, layers: int) -> tuple[int, int]:
        """Fewest and most launches a window.

        The fewest count the drafts alone. Each request's first token is certain; where drafts
        are not written in place, the stock write for it may remain, once a layer.
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
LOG_AND_RESTORE = Strategy(
    "log_and_restore",
    "log and restore",
    (
        Move("read the old row under each draft", reads=True, staged=1),
        Move("write it to the log", reads=False, staged=1),
        Move("write each draft to the cache", reads=False, staged=1),
        Move("read the log of rejected drafts", reads=True, staged=1, accepted=-1),
        Move("write them back to the cache", reads=False, staged=1, accepted=-1),
    ),
    launches_per_layer=2,
    launches_per_window=1,
    writes_drafts_in_place=True,
)
STRATEGIES = (DIRECT, COPY_SPILLED, COPY_IN_L2, BY_REFERENCE, LOG_AND_RESTORE)
