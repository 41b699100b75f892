"""DRAM bytes of each cell as rows of a table over several runs. Pure."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.analysis.dram.counters import COUNTERS, Amount, cell_bytes
from nwor_bench.records.store import RunData


def csv_rows(run: RunData) -> list[dict[str, Any]]:
    """One row per cell; None if not measured."""
    scenario, spec = run.header.scenario or {}, run.header.spec or {}
    rows = []
    for cell in cell_bytes(run):
        row: dict[str, Any] = {
            "pair": cell.cell.pair,
            "scenario": scenario.get("name"),
            "requests": scenario.get("requests"),
            "draft_tokens": scenario.get("draft_tokens"),
            "engine_args": spec.get("engine_args"),
            "stage_by": spec.get("stage_by"),
            "nwor_mode": str(cell.cell.nwor_mode),
            "scv_mode": str(cell.cell.scv_mode),
            "arm": cell.cell.arm,
            "blocks": cell.blocks,
            "windows": cell.windows,
            "matched_windows": cell.matched,
            "staged_tokens_mean": cell.staged,
            "accepted_tokens_mean": cell.accepted,
            "sampler_cost": cell.sampler_cost,
        }
        for name in COUNTERS:
            row |= _columns(name, cell.amounts.get(name), ("mean", "low", "high"))
            fields = ("mean", "low", "high", "smallest")
            row |= _columns(f"{name}_minus_off", cell.differences.get(name), fields)
            row[f"{name}_minus_off_predicted"] = cell.predicted.get(name)
        rows.append(row)
    return rows


def _columns(name: str, amount: Amount | None, fields: Sequence[str]) -> dict[str, float | None]:
    return {f"{name}_{part}": getattr(amount, part, None) for part in fields}
