"""One CSV from many run folders: a row per run and cell, with the published columns.

    python sweeps/studies/runs/compact.py FOLDER... --output sweeps/results/h200/runs.csv.gz

FOLDER is a run folder, or one that holds some. Read are run.json, the times of report.md's
section "Where a window's time goes", and the first mismatch of the gate in batches.csv.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.report.text import NOT_MEASURED

FROM_CELL = {
    "verdict": "verdict",
    "n": "batches",
    "windows": "windows",
    "ratio": "ratio_to_off",
    "ratio_low": "ratio_ci_low",
    "ratio_high": "ratio_ci_high",
    "compared": "compared",
    "smallest_effect": "smallest_effect",
    "window_ms": "window_ms_mean",
    "latency_ms_p50": "latency_ms_p50",
    "latency_ms_p95": "latency_ms_p95",
    "tokens_per_s": "tokens_per_s",
    "draft_tokens_total": "draft_tokens",
    "accepted_tokens": "accepted_tokens",
    "tokens_a_window": "acceptance_length",
    "staged": "nwor_total_staged",
    "committed": "nwor_total_committed",
    "rejected": "nwor_total_rejected",
    "parity": "parity",
}
"""Our column, and the key of run.json's cell; `n` is the number of blocks."""

FROM_REPORT = {
    "forward_ms": "Forward",
    "sample_ms": "Sample",
    "mask_ms": "Mask",
    "commit_ms": "Commit",
    "hooks_ms": "Hooks ms",
    "deciding_ms": "Deciding ms",
}
"""Our column, and the heading of report.md's tables: medians on the device and on the host."""

PACKAGES = ("vllm", "torch", "triton")


def cell_name(cell: dict[str, Any]) -> str:
    """`stage x graph`; the A/A arm says so."""
    arm = f" ({cell['arm']})" if cell.get("arm") else ""
    return f"{cell['nwor_mode']} x {cell['scv_mode']}{arm}"


def times_in(report: str) -> dict[str, dict[str, str]]:
    """Times by cell from a report in Markdown; a dash is no time."""
    found: dict[str, dict[str, str]] = {}
    heading: list[str] = []
    for line in report.splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if not line.startswith("|"):
            heading = []
        elif not heading:
            heading = parts
        elif not line.startswith("|:"):
            row = dict(zip(heading, parts, strict=True))
            times = {ours: row[theirs] for ours, theirs in FROM_REPORT.items() if theirs in row}
            measured = {name: time for name, time in times.items() if time != NOT_MEASURED}
            found.setdefault(parts[0], {}).update(measured)
    return found


def mismatches_in(table: Path) -> dict[str, str]:
    """Each cell's first mismatch in the gate; {} without a table of batches."""
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        gate = [row for row in csv.DictReader(file) if row["phase"] == "gate"]
    return {cell_name(row): row["first_mismatch"] for row in gate if row["first_mismatch"]}


def rows_of(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    """A row a cell of one run; only the first has the command."""
    header = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    scenario, environment = header["scenario"], header["environment"]
    report = folder / "report.md"
    times = times_in(report.read_text(encoding="utf-8")) if report.is_file() else {}
    mismatches = mismatches_in(folder / "batches.csv")
    gpu = (environment["gpus"] or [{}])[0]
    facts = {
        "run": name,
        "pair": header["pair"]["name"],
        "scenario": scenario["name"],
        "requests": scenario["requests"],
        "draft_tokens": scenario["draft_tokens"],
        "dtype": header["spec"].get("dtype") or header["pair"]["dtype"],
        "cache_dtype": (header["spec"].get("engine_args") or {}).get("kv_cache_dtype", "auto"),
        "synthetic_length": _synthetic_length(header),
    }
    origin = {
        "gpu": gpu.get("name", "none"),
        "driver": gpu.get("driver"),
        **{package: environment["packages"].get(package) for package in PACKAGES},
        "commit": (environment["git"]["revision"] or "")[:12],
        "started_at": header["started_at"],
    }
    for place, cell in enumerate(header["cells"]):
        label = cell_name(cell)
        figures = {ours: cell.get(theirs) for ours, theirs in FROM_CELL.items()}
        measured = times.get(label, {})
        yield {
            **facts,
            "cell": label,
            **figures,
            "first_mismatch": mismatches.get(label, ""),
            **{column: measured.get(column, "") for column in FROM_REPORT},
            **origin,
            "command": "" if place else header["command"],
        }


def _synthetic_length(header: dict[str, Any]) -> float | None:
    """Tokens per window by synthetic acceptance; None if drafts are really verified."""
    own = header["spec"].get("speculative_config") or {}
    length: float | None = (header["pair"]["speculative"] | own).get("synthetic_acceptance_length")
    return length


def compact(roots: Sequence[Path]) -> pd.DataFrame:
    """All runs below the roots; a run is named by its path from its root's parent."""
    rows = [
        row
        for root in roots
        for path in sorted(root.rglob("run.json"))
        for row in rows_of(path.parent, str(path.parent.relative_to(root.parent)))
    ]
    return pd.DataFrame(rows)


def main() -> None:
    """Read the folders and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    packed = {"method": "infer", "mtime": 0}  # the same rows are the same bytes
    rows = compact(options.folders)
    rows.to_csv(options.output, index=False, float_format="%.6g", compression=packed)


if __name__ == "__main__":
    main()
