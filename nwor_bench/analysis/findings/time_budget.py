"""A run whose time budget was spent before its first timed block. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from statistics import median
from typing import Any

from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.records.header import KvGateFacts, RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, RunStatus
from nwor_bench.workload.run_spec import Counters

FEW_BLOCKS = 10
"""Below this an interval rests on too little to be tight."""

SHARES = 1.6
"""A budget over the time that it must leave: up to 35 % may go to warm-up and probed blocks."""

_FINE_S = 120
"""Up to here a budget is rounded up to 10 s, above to whole minutes."""


def nothing_timed(header: RunHeader, cells: Sequence[CellResult]) -> str | None:
    """Where the time budget went, as a clause, if it left no room for a timed block; else None.

    None too for a run that was interrupted or failed: there the clock is not the cause.
    """
    budget_s = (header.spec or {}).get("time_budget_s")
    timed = any(cell.windows or cell.batches or cell.groups for cell in cells)
    by_clock = header.status is RunStatus.COMPLETE and header.stopped is not None
    if not by_clock or timed or budget_s is None or header.measuring_s is None:
        return None
    gate_s = (header.kv_gate or KvGateFacts()).gate_seconds
    gate = "" if gate_s is None else f" (the gate alone {_seconds(gate_s)})"
    lost = " and ".join(("no block was timed", *_not_counted(header.spec or {})))
    return (
        f"warm-up and gate took {_seconds(header.measuring_s)}{gate} of the time budget of "
        f"{budget_s:g} s, so {lost}"
    )


def sufficient_budget(run: RunData, cells: Sequence[CellResult]) -> str:
    """A `--time-budget` with room for `FEW_BLOCKS` timed blocks, for a run that timed none.

    SHARES x (spent + (FEW_BLOCKS + counted) x block), rounded up: `spent` is what warm-up and gate
    took, `counted` the blocks that count DRAM bytes or launches and must fit in too, `block` a
    batch of every cell at the median of those that ran (the run itself expects as much).
    """
    batch_s = median(batch.latency_ms for batch in run.batches) / 1e3 if run.batches else 0.0
    blocks = FEW_BLOCKS + _counted_blocks(run.header)
    wanted = SHARES * ((run.header.measuring_s or 0.0) + blocks * len(cells) * batch_s)
    return f"{10 * ceil(wanted / 10)}s" if wanted <= _FINE_S else f"{ceil(wanted / 60)}m"


def time_budget_findings(run: RunData, cells: Sequence[CellResult]) -> Iterator[Finding]:
    """What was asked for and not measured, and the budget to write instead."""
    clause = nothing_timed(run.header, cells)
    if clause is not None:
        yield Finding(
            FindingKind.TIME_BUDGET,
            Severity.WARNING,
            f"{clause[0].upper()}{clause[1:]}.",
            f"Write --time-budget {sufficient_budget(run, cells)}.",
        )


def _not_counted(spec: Mapping[str, Any]) -> Iterator[str]:
    """Counters that were asked for; their blocks run behind the timed ones."""
    if spec.get("counters") == Counters.DRAM:
        yield "no DRAM bytes were counted"
    if spec.get("counters") == Counters.LAUNCHES:
        yield "no launches were counted"


def _counted_blocks(header: RunHeader) -> int:
    """As `RunSpec.counted_blocks` plans them."""
    spec, scenario = header.spec or {}, header.scenario or {}
    if spec.get("counters") == Counters.DRAM:
        return int(scenario.get("batches", FEW_BLOCKS))
    return 1 if spec.get("counters") == Counters.LAUNCHES else 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
