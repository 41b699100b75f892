"""The gate's checks of differing tokens: events for the records, a summary for run.json."""

from collections.abc import Iterable
from typing import Any

from nwor_bench.analysis.parity.differences import TokenCheck
from nwor_bench.analysis.parity.ties import ALLOWED_RMS, ErrorScale
from nwor_bench.records.types import BatchRecord, Cell

TIES_EVENT = "ties"


def ties_event(
    cell: Cell, batch: BatchRecord, checked: TokenCheck, scale: ErrorScale, spent_s: float
) -> dict[str, Any]:
    """Checks of one batch's differing tokens. Gaps are in nats, the time spent in seconds."""
    return {
        "event": TIES_EVENT,
        **cell.names,
        "phase": batch.phase,
        "block": batch.block,
        "parity": checked.comparison.parity,
        "differences": len(checked.verdicts),
        "largest_gap": checked.largest_gap,
        "squared_multiples": sum(v.multiple**2 for v in checked.verdicts),
        "rounds": checked.rounds,
        "tokens_compared": checked.tokens_compared,
        "tokens": checked.tokens,
        "error_rms": scale.rms,
        "error_largest": scale.largest,
        "error_positions": scale.positions,
        "positions_within": scale.within,
        "error_moved_rms": scale.moved_rms,
        "allowance": scale.allowance,
        "spent_s": spent_s,
    }


def event_key(event: dict[str, Any]) -> tuple[Any, ...]:
    """Cell and batch of an event; a block that ran again replaces its earlier event."""
    names = ("pair", "nwor_mode", "scv_mode", "arm", "phase", "block")
    return tuple(event.get(name) for name in names)


def ties_facts(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """All batches together, for run.json; None if no token differed.

    Token counts include only batches with a difference. The error scale is the latest one: a
    resumed run measures it again.
    """
    every = list(events)
    if not every:
        return None
    latest = every[-1]
    gaps = [event["largest_gap"] for event in every if event["largest_gap"] is not None]
    return {
        "batches_with_differences": len(every),
        "differences_judged": sum(event["differences"] for event in every),
        "largest_gap_nats": max(gaps, default=None),
        "tokens_compared": sum(event["tokens_compared"] for event in every),
        "tokens": sum(event["tokens"] for event in every),
        "continuation_batches": sum(event["rounds"] for event in every),
        "judging_s": sum(event["spent_s"] for event in every),
        "error_rms_nats": latest["error_rms"],
        "error_largest_nats": latest["error_largest"],
        "error_positions": latest["error_positions"],
        "error_positions_within_allowance": latest["positions_within"],
        "allowance_nats": latest["allowance"],
        "allowance": f"{ALLOWED_RMS:g} times error_rms_nats, error_largest_nats or the place's own "
        "movement: the largest",
    }
