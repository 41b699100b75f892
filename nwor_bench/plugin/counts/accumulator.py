"""Windows of one worker, kept until they are drained, and their totals."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from nwor_bench.records.types import WindowCounts, WindowTimes
from nwor_bench.workload.window_order import Turn

MAX_UNDRAINED = 10_000
"""Windows kept where none was ever drained (`vllm serve`); of older ones only totals remain."""

MAX_BETWEEN_DRAINS = 1_000_000
"""Windows kept between two drains of a run: more than an hour of one batch."""


@dataclass
class Accumulator:
    """Per-window records and running totals of one worker. Plain host numbers only."""

    windows: deque[tuple[WindowCounts, WindowTimes, Turn | None]] = field(default_factory=deque)
    """Windows since the last drain, oldest first."""
    totals: Counter[str] = field(default_factory=Counter)
    """Sums over all windows, by metric name; a drain leaves them."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Windows that were written directly, by reason; a drain leaves them."""
    listener: Callable[[WindowCounts], None] | None = None
    """Called with every window as it is added, for the metrics of `vllm serve`."""
    turn_listener: Callable[[WindowCounts, WindowTimes, Turn | None], None] | None = None
    """Called likewise with its times and turn, where windows of `vllm serve` take turns."""
    drained: bool = False
    """True after the first drain: then more drains are expected."""

    @property
    def most_kept(self) -> int:
        """Most windows that wait for a drain."""
        return MAX_BETWEEN_DRAINS if self.drained else MAX_UNDRAINED

    def add(self, counts: WindowCounts, times: WindowTimes, turn: Turn | None = None) -> None:
        """Keep one finished window; `turn` is its turn in an interleaved batch."""
        self.windows.append((counts, times, turn))
        if len(self.windows) > self.most_kept:
            self.windows.popleft()
        self.totals["windows"] += 1
        self.totals["draft_tokens"] += counts.draft_tokens
        self.totals["accepted_tokens"] += counts.accepted_tokens
        self.totals["nwor_total_staged"] += counts.staged_tokens
        self.totals["nwor_total_committed"] += counts.committed_tokens
        self.totals["nwor_total_rejected"] += counts.rejected_tokens
        self.totals["nwor_stage_operations"] += counts.stage_operations
        if counts.fallback_reason:
            self.totals["nwor_fallback_count"] += 1
            self.fallbacks[counts.fallback_reason] += 1
        if self.listener is not None:
            self.listener(counts)
        if self.turn_listener is not None:
            self.turn_listener(counts, times, turn)

    def drain(self) -> list[dict[str, Any]]:
        """Return the windows since the last drain, oldest first, and forget them."""
        drained = [
            {**vars(counts), **vars(times), **(vars(turn) if turn else {})}
            for counts, times, turn in self.windows
        ]
        self.windows.clear()
        self.drained = True
        return drained


def per_position(
    num_draft_tokens: ArrayLike, num_accepted: ArrayLike
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Requests that accepted draft j, and requests that had a draft j, for each j.

    Args:
        num_draft_tokens, num_accepted: [requests] int each.
    """
    drafts = np.asarray(num_draft_tokens, dtype=np.int64)
    places = np.arange(drafts.max(initial=0))
    accepted = (np.asarray(num_accepted, dtype=np.int64)[:, None] > places).sum(axis=0)
    return tuple(accepted.tolist()), tuple((drafts[:, None] > places).sum(axis=0).tolist())
