"""Time of interleaved windows by cell and part, and the gate, of models with recurrent states.

    python sweeps/studies/states/measure.py RUN [RUN ...]      # writes windows.csv beside this file

A row is a cell of one run folder of `nwor-bench sweep`, its times medians of its windows.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase

TIMES = ("device_ms", "work_ms", "forward_ms", "sample_ms", "commit_ms")
FIELDS = ("verdict", "groups", "ratio_to_off", "ratio_ci_low", "ratio_ci_high")
FIELDS += ("work_ratio", "work_ratio_ci_low", "work_ratio_ci_high")


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """One row a cell; what was not measured is empty."""
    run = read_run(folder)
    header = run.header
    phases = {batch.batch: batch.phase for batch in run.batches}
    gates = header.kv_gate.cells or {}
    for cell in analyse(run).cells:
        own = [
            window
            for window in run.windows
            if window.cell == cell.cell
            and window.arm == cell.arm
            and phases[window.batch] is Phase.INTERLEAVED
            and window.device_ms is not None
        ]
        yield {
            "pair": header.pair.name,
            "gpu": header.environment.gpus[0].name,
            "requests": header.scenario["requests"],
            "drafts": header.scenario["draft_tokens"],
            "state_bytes": header.engine.state_bytes,
            "cell": cell.label,
            "kv_verdict": gates.get(cell.label, {}).get("verdict"),
            "windows": len(own),
            **{name: pd.Series([getattr(w, name) for w in own]).median() for name in TIMES},
            **{name: getattr(cell, name) for name in FIELDS},
        }


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    rows = [row for folder in parser.parse_args().runs for row in rows_of(folder)]
    pd.DataFrame(rows).round(6).to_csv(Path(__file__).with_name("windows.csv"), index=False)


if __name__ == "__main__":
    main()
