"""Time of windows by cell and part, and the gate, of models with recurrent states.

    python sweeps/studies/states/measure.py RUN [RUN ...]    # into windows.csv beside this file
    python sweeps/studies/states/measure.py --one-slot RUN   # into one-slot.csv

RUN is a run folder of `nwor-bench sweep`, or a folder of them. A row is a cell of one run, its
times medians of its interleaved windows; with `--against`, of its timed batches' windows. Rows of
other settings stay in the CSV. "weights" is vLLM's `quantization`, empty if there is none.

--one-slot: the whole batches, of the gate and timed, of a run against an engine with one state slot
a request.
"""

import argparse
import json
import sys
from collections import Counter
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
    spec = header.spec
    against = spec.against
    phases = {batch_key(batch): batch.phase for batch in run.batches}
    phase = Phase.INTERLEAVED if against is None else Phase.TIMED
    gates = header.kv_gate.cells or {}
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
            "weights": spec.engine_args.get("quantization"),
            "requests": header.scenario["requests"],
            "drafts": header.scenario["draft_tokens"],
            "context": header.scenario["prompts"]["tokens"],
            "cache": header.engine.kv_cache_dtype,
            "against": None if against is None else json.dumps(against),
            "state_bytes": header.engine.state_bytes,
            "cell": cell.label,
            "kv_verdict": gates.get(cell.label, {}).get("verdict"),
            "windows": len(own),
            **{name: pd.Series(found, dtype=float).median() for name, found in times.items()},
            **{name: getattr(cell, name) for name in FIELDS},
        }


def batches_of(folder: Path) -> Iterator[dict[str, Any]]:
    """A row a batch of the gate and of timed blocks, with the requests that ran at once."""
    run = read_run(folder)
    at_once = Counter[tuple[int, int]]()
    for window in run.windows:
        key = batch_key(window)
        at_once[key] = max(at_once[key], window.num_reqs)
    for batch in run.batches:
        if batch.phase in (Phase.GATE, Phase.TIMED):
            yield {
                "pair": run.header.pair.name,
                "gpu": run.header.environment.gpus[0].name,
                "requests": batch.requests,
                "cache_bytes": run.header.spec.engine_args.get("kv_cache_memory_bytes"),
                "phase": batch.phase,
                "block": batch.block,
                "cell": batch.cell.label,
                "parity": batch.parity,
                "at_once": at_once[batch_key(batch)],
                "windows": batch.windows,
                "latency_ms": round(batch.latency_ms, 1),
                "tokens_per_s": round(batch.tokens_per_s, 1),
            }


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--one-slot", action="store_true", help="whole batches, into one-slot.csv")
    arguments = parser.parse_args()
    folders = arguments.runs
    found = [file.parent for folder in folders for file in sorted(folder.rglob(RUN_FILE))]
    if arguments.one_slot:
        batches = pd.DataFrame(row for folder in found for row in batches_of(folder))
        batches.convert_dtypes().to_csv(Path(__file__).with_name("one-slot.csv"), index=False)
        return
    rows = [row for folder in found for row in rows_of(folder)]
    if not rows:
        parser.error("no complete run")
    new = pd.DataFrame(rows).round(6).convert_dtypes()  # whole numbers stay whole
    add_rows(Path(__file__).with_name("windows.csv"), new, SETTING)


if __name__ == "__main__":
    main()
