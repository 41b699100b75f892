"""Windows of one worker, kept until they are drained, and their totals."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nwor_bench.records.types import MeasuredWindow
from nwor_bench.workload.window_order import Turn

MAX_UNDRAINED = 10_000
"""Windows kept if none was ever drained (`vllm serve`); of older ones only totals remain."""

MAX_BETWEEN_DRAINS = 1_000_000
"""Windows kept between two drains of a run: more than an hour of one batch."""

TOTALS = {
    "draft_tokens": "draft_tokens",
    "accepted_tokens": "accepted_tokens",
    "nwor_total_staged": "staged_tokens",
    "nwor_total_committed": "committed_tokens",
    "nwor_total_rejected": "rejected_tokens",
    "nwor_stage_operations": "stage_operations",
}
"""The field of a window that each total sums up."""


@dataclass
class Accumulator:
    """Measured windows and running totals of one worker. Plain host numbers only."""

    windows: deque[tuple[MeasuredWindow, Turn | None]] = field(default_factory=deque)
    """Windows since the last drain with their turns in an interleaved batch, oldest first."""
    totals: Counter[str] = field(default_factory=Counter)
    """Sums over all windows, by metric name; a drain leaves them."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Windows that were written directly, by reason; a drain leaves them."""
    listeners: list[Callable[[MeasuredWindow, Turn | None], None]] = field(default_factory=list)
    """Called with every window as it is added, for the metrics of `vllm serve`."""
    drained: bool = False
    """True after the first drain: then more drains are expected."""

    @property
    def most_kept(self) -> int:
        """Most windows that wait for a drain."""
        return MAX_BETWEEN_DRAINS if self.drained else MAX_UNDRAINED

    def add(self, window: MeasuredWindow, turn: Turn | None = None) -> None:
        """Keep one finished window."""
        self.windows.append((window, turn))
        if len(self.windows) > self.most_kept:
            self.windows.popleft()
        self.totals["windows"] += 1
        for name, of_window in TOTALS.items():
            self.totals[name] += getattr(window, of_window)
        if window.fallback_reason:
            self.totals["nwor_fallback_count"] += 1
            self.fallbacks[window.fallback_reason] += 1
        for listener in self.listeners:
            listener(window, turn)

    def drain(self) -> list[dict[str, Any]]:
        """Return the windows since the last drain as dicts, oldest first, and forget them."""
        drained = [
            {**vars(window), **(vars(turn) if turn else {})} for window, turn in self.windows
        ]
        self.windows.clear()
        self.drained = True
        return drained
