"""The K/V gate's result for one cell, as stored in run.json and the records."""

from dataclasses import asdict, dataclass
from typing import Any

from nwor_bench.analysis.parity.kv_verdict import KvMismatch, KvVerdict
from nwor_bench.records.types import Cell

KV_EVENT = "kv_gate"


@dataclass(frozen=True)
class KvResult:
    """The K/V gate's result for one cell; None for anything not checked."""

    verdict: KvVerdict
    reason: str | None = None
    """Why the verdict is BROKEN or NOT_RUN."""
    compared_with: str | None = None
    committed: int | None = None
    """Positions whose K/V the cache must hold, over all requests."""
    checked: int | None = None
    """Positions that were compared, in every layer on every rank."""
    unknown: int | None = None
    """Positions whose block another request had been given before the batch ended."""
    beyond_budget: int | None = None
    """Positions that had no room in memory."""
    layers: int | None = None
    ranks: int | None = None
    finding: KvMismatch | None = None
    """The error that decides, or the one closest to its limit; None: every row is equal."""
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the finding includes its ratio to the limit."""
        told = {**asdict(self), "verdict": str(self.verdict)}
        if self.finding is not None:
            ratio = self.finding.ratio
            told["finding"]["ratio"] = None if ratio == float("inf") else ratio
        return told


def kv_event(cell: Cell, result: KvResult) -> dict[str, Any]:
    """The result for the records."""
    return {
        "event": KV_EVENT,
        **cell.names,
        **result.to_dict(),
    }
