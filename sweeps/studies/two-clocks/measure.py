"""The step's and the work's ratio of each cell, from interleaved runs on a GPU.

    python sweeps/studies/two-clocks/measure.py RUN [RUN ...]      # adds to cells.csv beside it
    python sweeps/studies/two-clocks/measure.py --file gated.csv RUN [RUN ...]

A row is a compared cell of one run folder of `nwor-bench sweep`. Rows of the same setting are
replaced, all others stay.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Cell, Phase

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tables import add_rows

SETTING = ["pair", "gpu", "requests", "drafts", "context", "cache"]
"""Columns that a run's rows share, and no other run's rows have."""

FIELDS = (
    *("verdict", "reason", "groups", "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
    *("work_ratio", "work_ratio_ci_low", "work_ratio_ci_high", "nwor_fallback_count"),
)


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """One row a compared cell; what was not measured is empty."""
    run = read_run(folder)
    header = run.header
    scenario, engine = header.scenario, header.engine
    size = f"{scenario['requests']}x{scenario['draft_tokens'] + 1}"
    for cell in analyse(run).cells:
        own = [w for w in run.windows if w.cell == cell.cell and w.work_ms is not None]
        times = pd.DataFrame({"step": [w.device_ms for w in own], "work": [w.work_ms for w in own]})
        yield {
            "pair": header.pair.name,
            "gpu": header.environment.gpus[0].name,
            "requests": scenario["requests"],
            "drafts": scenario["draft_tokens"],
            "context": scenario["prompts"]["tokens"],
            "cache": engine.kv_cache_dtype,
            "attention": (engine.cuda_graphs.attention or {}).get(size),
            "cell": cell.label,
            "step_ms": times.step.median(),
            "work_ms": times.work.median(),
            "tokens_per_s_percent": 100 * (cell.tokens_per_s_ratio - 1)
            if cell.tokens_per_s_ratio
            else None,
            **{name: getattr(cell, name) for name in FIELDS},
            **gated(run, cell.cell),
        }


def gated(run: RunData, cell: Cell) -> dict[str, int | None]:
    """Ready windows in the gate and timed; layers whose K/V and own inputs were compared."""
    phases = {batch.batch: batch.phase for batch in run.batches}
    ready = Counter(
        phases[w.batch] in (Phase.GATE, Phase.INTERLEAVED_GATE)
        for w in run.windows
        if w.cell == cell and (w.path or "").endswith("ready")
    )
    events = {e["event"]: e for e in run.events if "event" in e and cell.names.items() <= e.items()}
    kv, local = events.get("kv_gate", {}), events.get("local_gate", {})
    return {
        "ready_gate": ready[True],
        "ready_timed": ready[False],
        "kv_layers": kv.get("layers"),
        "local_layers": local.get("layers"),
    }


def add(rows: list[dict[str, Any]], file: Path) -> None:
    """Add rows to the CSV in place of those of the same settings."""
    add_rows(file, pd.DataFrame(rows).round(6).astype({"context": "Int64"}), SETTING)


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--file", default="cells.csv", help="the CSV, beside this script")
    arguments = parser.parse_args()
    rows = [row for folder in arguments.runs for row in rows_of(folder)]
    add(rows, Path(__file__).with_name(arguments.file))


if __name__ == "__main__":
    main()
