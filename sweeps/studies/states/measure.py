"""Time of windows by cell and part, and the gate, of models with recurrent states.

    python sweeps/studies/states/measure.py RUN [RUN ...]    # into windows.csv beside this file

RUN is a run folder of `nwor-bench sweep`, or a folder of them. A row is a cell of one run, its
times medians of its interleaved windows; with `--against`, of its timed batches' windows. Rows of
other settings stay in the CSV. "weights" is vLLM's `quantization`, empty if there is none.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.files import RUN_FILE
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase, RunStatus

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tables import add_rows

SETTING = ["pair", "gpu", "weights", "requests", "drafts", "against"]
TIMES = ("wall_ms", "device_ms", "work_ms", "forward_ms", "sample_ms", "commit_ms")
FIELDS = ("acceptance_length", "parity", "verdict", "groups")
FIELDS += ("ratio_to_off", "ratio_ci_low", "ratio_ci_high")
FIELDS += ("work_ratio", "work_ratio_ci_low", "work_ratio_ci_high")


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """One row a cell of a complete run; what was not measured is empty."""
    run = read_run(folder)
    header = run.header
    if header.status is not RunStatus.COMPLETE:
        return
    spec = header.spec or {}
    against = spec.get("against")
    phases = {batch_key(batch): batch.phase for batch in run.batches}
    phase = Phase.INTERLEAVED if against is None else Phase.TIMED
    gates = (header.kv_gate and header.kv_gate.cells) or {}
    for cell in analyse(run).cells:
        own = [
            window
            for window in run.windows
            if window.cell == cell.cell and phases[batch_key(window)] is phase
        ]
        times = {name: [getattr(window, name) for window in own] for name in TIMES}
        yield {
            "pair": header.pair.name,
            "gpu": header.environment.gpus[0].name,
            "weights": spec.get("engine_args", {}).get("quantization"),
            "requests": header.scenario["requests"],
            "drafts": header.scenario["draft_tokens"],
            "against": None if against is None else json.dumps(against),
            "state_bytes": header.engine.state_bytes,
            "cell": cell.label,
            "kv_verdict": gates.get(cell.label, {}).get("verdict"),
            "windows": len(own),
            **{name: pd.Series(found, dtype=float).median() for name, found in times.items()},
            **{name: getattr(cell, name) for name in FIELDS},
        }


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of them")
    folders = parser.parse_args().runs
    found = [file.parent for folder in folders for file in sorted(folder.rglob(RUN_FILE))]
    rows = [row for folder in found for row in rows_of(folder)]
    if not rows:
        parser.error("no complete run")
    new = pd.DataFrame(rows).round(6).convert_dtypes()  # whole numbers stay whole
    add_rows(Path(__file__).with_name("windows.csv"), new, SETTING)


if __name__ == "__main__":
    main()
