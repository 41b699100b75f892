"""Rows of a study's CSV from run folders of `nwor-bench sweep`.

    python sweeps/studies/run_rows.py STUDY RUN [RUN ...] [--output FILE]
    python sweeps/studies/run_rows.py interleave --host 3 RUN [RUN ...]

RUN is the folder of a complete run, or a folder of them; STUDY one of STUDIES, which has the CSV,
its setting and its columns. Rows of the same setting are replaced, all others stay as written.
What was not measured is empty.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.phases import cell_phases
from nwor_bench.records.files import RUN_FILE
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData, read_run
from nwor_bench.records.types import Cell, Phase, RunStatus, to_dict

sys.path.append(str(Path(__file__).resolve().parent))
from tables import SWEEPS, add_rows

Facts = dict[str, Any]
"""What is known of a run, a cell or a batch, by name; parts of run.json as `engine.layers`."""

COLUMNS = {
    "pair": "pair.name",
    "scenario": "scenario.name",
    "requests": "scenario.requests",
    "drafts": "scenario.draft_tokens",
    "context": "scenario.prompts.tokens",
    "cache": "engine.kv_cache_dtype",
    "cache_bytes": "spec.engine_args.kv_cache_memory_bytes",
    "weights": "spec.engine_args.quantization",
    "state_bytes": "engine.state_bytes",
    "layers": "engine.target_layers",
    "drafter_layers": "engine.drafter_layers",
    "driver": "environment.gpus.0.driver",
    "vllm": "environment.packages.vllm",
    "torch": "environment.packages.torch",
    "triton": "environment.packages.triton",
    "fallbacks": "nwor_fallback_count",
    "staged": "nwor_total_staged",
    "committed": "nwor_total_committed",
    "rejected": "nwor_total_rejected",
    "kv_verdict": "kv.verdict",
}
"""Column, and the fact that it holds; any other column is the fact of its name."""

TIMES = ("wall_ms", "device_ms", "work_ms", "forward_ms", "sample_ms", "commit_ms")


def flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every leaf of a JSON value by its dotted name."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from flat(part, f"{name}.{key}" if name else str(key))


def facts_of_run(folder: Path, name: str, header: Facts) -> Facts:
    """Facts that all rows of a run share."""
    facts = dict(flat(header, ""))
    spec, scenario = header["spec"], header["scenario"]
    acceptance = header["pair"].get("speculative") or {}
    acceptance |= spec.get("speculative_config") or {}
    against = spec.get("against")
    size = f"{scenario['requests']}x{scenario['draft_tokens'] + 1}"
    return facts | {
        "run": name,
        "gpu": facts.get("environment.gpus.0.name", "none"),
        "commit": (facts.get("environment.git.revision") or "")[:12],
        "dtype": spec.get("dtype") or facts.get("pair.dtype"),
        "cache_asked": facts.get("spec.engine_args.kv_cache_dtype", "auto"),
        "acceptance": acceptance.get("synthetic_acceptance_length"),
        "against": None if against is None else json.dumps(against),
        "attention": facts.get(f"engine.cuda_graphs.attention.{size}"),
    }


def cells_and_splits(folder: Path, header: Facts) -> Iterator[Facts]:
    """Cells of today's analysis, then the writes' part of each effect that was split."""
    run = read_run(folder)
    analysis = analyse(run)
    kept = (header.get("kv_gate") or {}).get("cells") or {}
    clocks = [
        batch.conditions["gpu_sm_clock_mhz"]
        for batch in run.batches
        if batch.phase is Phase.INTERLEAVED and "gpu_sm_clock_mhz" in batch.conditions
    ]
    shared = {
        "clock_low_mhz": min(clocks, default=None),
        "clock_high_mhz": max(clocks, default=None),
        "verdict_of_off": next((c.verdict for c in analysis.cells if c.label == "off x off"), None),
    }
    phases = {phase.cell: phase for phase in cell_phases(run)}
    for place, cell in enumerate(analysis.cells):
        phase = phases.get(cell.cell)
        rate = cell.tokens_per_s_ratio
        yield (
            shared
            | to_dict(cell)
            | facts_of_records(run, cell.cell)
            | {
                "cell": cell.label,
                "command": None if place else header["command"],
                "first_mismatch": mismatch_of(run, cell.cell),
                **(dict(flat(vars(phase), "phases")) if phase else {}),
                "tokens_per_s_percent": 100 * (rate - 1) if rate else None,
                **{f"kv.{name}": fact for name, fact in kept.get(cell.label, {}).items()},
            }
        )
    for split in analysis.splits:
        part = split.writes
        ends = {"ratio_to_off": part.value, "ratio_ci_low": part.low, "ratio_ci_high": part.high}
        yield shared | ends | {"cell": f"{split.cell.label} over {split.control.label}"}


def mismatch_of(run: RunData, cell: Cell) -> str | None:
    """The cell's first mismatch in the gate."""
    gate = (b.first_mismatch for b in run.batches if b.cell == cell and b.phase is Phase.GATE)
    return next(filter(None, gate), None)


def cells(folder: Path, header: Facts) -> Iterator[Facts]:
    """Cells of today's analysis."""
    return (facts for facts in cells_and_splits(folder, header) if "verdict" in facts)


def first_staged(folder: Path, header: Facts) -> Iterator[Facts]:
    """The first cell that stages, as the tables of MTP models have one row a run."""
    return islice((f for f in cells(folder, header) if f["cell"].startswith("stage x ")), 1)


def facts_of_records(run: RunData, cell: Cell) -> Facts:
    """Medians over a cell's windows, on which path they were ready, and what the gates compared.

    `timed` are its interleaved windows; with `--against`, those of timed batches. `worked` are all
    in which the GPU's work was timed.
    """
    phases = {batch_key(batch): batch.phase for batch in run.batches}
    timed_phase = Phase.INTERLEAVED if run.header.spec.against is None else Phase.TIMED
    windows = [window for window in run.windows if window.cell == cell]
    timed = [w for w in windows if phases[batch_key(w)] is timed_phase]
    worked = [w for w in windows if w.work_ms is not None]
    ready = Counter(
        phases[batch_key(w)] in (Phase.GATE, Phase.INTERLEAVED_GATE)
        for w in windows
        if (w.path or "").endswith("ready")
    )
    facts: Facts = {
        "timed.windows": len(timed),
        "ready_gate": ready[True],
        "ready_timed": ready[False],
    }
    for kind, chosen in (("timed", timed), ("worked", worked)):
        for name in TIMES:
            times = pd.Series([getattr(window, name) for window in chosen], dtype=float)
            facts[f"{kind}.{name}"] = times.median()
    for event in run.events:
        if event.get("event") in ("kv_gate", "local_gate") and cell.names.items() <= event.items():
            facts |= {f"{event['event']}.{name}": fact for name, fact in event.items()}
    return facts


def whole_batches(folder: Path, header: Facts) -> Iterator[Facts]:
    """Batches of the gate and of timed blocks, with the requests that ran at once."""
    run = read_run(folder)
    at_once = Counter[tuple[int, int]]()
    for window in run.windows:
        key = batch_key(window)
        at_once[key] = max(at_once[key], window.num_reqs)
    for batch in run.batches:
        if batch.phase in (Phase.GATE, Phase.TIMED):
            yield to_dict(batch) | {
                "cell": batch.cell.label,
                "at_once": at_once[batch_key(batch)],
                "latency_ms": round(batch.latency_ms, 1),
                "tokens_per_s": round(batch.tokens_per_s, 1),
            }


@dataclass(frozen=True)
class Study:
    """A CSV file and what its rows hold."""

    file: str
    """Below sweeps/."""
    setting: str
    """Columns that a run's rows share, and no other run's rows have."""
    columns: str
    """Names in their order; `name=fact` for another fact than COLUMNS has."""
    rows: Callable[[Path, Facts], Iterable[Facts]] = cells

    def sources(self) -> dict[str, str]:
        """Each column's fact."""
        pairs = (column.partition("=") for column in self.columns.split())
        return {name: fact or COLUMNS.get(name, name) for name, _, fact in pairs}


RATIO = "ratio_to_off ratio_ci_low ratio_ci_high"
WORK = "work_ratio work_ratio_ci_low work_ratio_ci_high"
CLOCKS = (
    "pair gpu requests drafts context cache attention cell step_ms=worked.device_ms "
    f"work_ms=worked.work_ms tokens_per_s_percent verdict reason groups {RATIO} {WORK} "
    "nwor_fallback_count"
)

STUDIES = {
    "runs": Study(
        "results/h200/runs.csv.gz",
        "run",
        "run pair scenario requests draft_tokens=scenario.draft_tokens dtype "
        "cache_dtype=cache_asked synthetic_length=acceptance cell verdict n=batches windows "
        "ratio=ratio_to_off ratio_low=ratio_ci_low ratio_high=ratio_ci_high compared "
        "smallest_effect window_ms=window_ms_mean latency_ms_p50 latency_ms_p95 tokens_per_s "
        "draft_tokens_total=draft_tokens accepted_tokens tokens_a_window=acceptance_length staged "
        "committed rejected parity first_mismatch forward_ms=phases.device_ms.forward_ms "
        "sample_ms=phases.device_ms.sample_ms mask_ms=phases.device_ms.mask_ms "
        "commit_ms=phases.device_ms.commit_ms hooks_ms=phases.hook_ms "
        "deciding_ms=phases.scv_host_ms "
        "gpu driver vllm torch triton commit started_at command",
    ),
    "interleave": Study(
        "studies/interleave/cells.csv",
        "host",
        "pair requests context cache=cache_asked acceptance clock_low_mhz clock_high_mhz cell "
        f"compared groups {RATIO} batches ratio_batches ratio_batches_low ratio_batches_high "
        "tokens_per_s verdict host",
        cells_and_splits,
    ),
    "states": Study(
        "studies/states/windows.csv",
        "pair gpu weights requests drafts against revision",
        "pair gpu weights requests drafts revision=commit context cache against state_bytes cell "
        f"kv_verdict windows=timed.windows {' '.join(f'{name}=timed.{name}' for name in TIMES)} "
        f"acceptance_length parity verdict groups {RATIO} {WORK}",
    ),
    "one-slot": Study(
        "studies/states/one-slot.csv",
        "pair gpu cache_bytes",
        "pair gpu requests=requests cache_bytes phase block cell parity at_once windows "
        "latency_ms tokens_per_s",
        whole_batches,
    ),
    "two-clocks": Study(
        "studies/two-clocks/cells.csv", "pair gpu requests drafts context cache", CLOCKS
    ),
    "gated": Study(
        "studies/two-clocks/gated.csv",
        "pair gpu requests drafts context cache",
        f"{CLOCKS} ready_gate ready_timed kv_layers=kv_gate.layers local_layers=local_gate.layers",
    ),
    "versions": Study(
        "studies/versions/cells.csv",
        "pair gpu requests drafts context vllm compile_mode",
        f"{CLOCKS} torch ready_gate ready_timed kv_layers=kv_gate.layers "
        "local_layers=local_gate.layers vllm "
        "compile_mode=spec.engine_args.compilation_config.mode",
    ),
    "mtp": Study(
        "studies/mtp/mtp.csv",
        "pair gpu",
        "pair gpu requests layers drafter_layers attention=engine.attention_backend "
        "staged_tokens=nwor_total_staged committed_tokens=nwor_total_committed fallbacks "
        "positions_checked=kv.checked positions_committed=kv.committed kv_verdict "
        f"attention_error_over_allowed=local_gate.nearest groups {RATIO} verdict verdict_of_off",
        first_staged,
    ),
}


def rows_of(study: Study, folder: Path, name: str, **more: Any) -> list[Facts]:
    """The study's rows of one run; [] if it is not complete."""
    header = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
    if header["status"] != RunStatus.COMPLETE:
        return []
    shared = facts_of_run(folder, name, header) | more
    sources = study.sources()
    return [
        {name: (shared | facts).get(fact) for name, fact in sources.items()}
        for facts in study.rows(folder, header)
    ]


def main() -> None:
    """Read the folders and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders of them")
    parser.add_argument("--output", type=Path, help="instead of the study's own CSV")
    parser.add_argument("--host", type=int, default=1, help="column of interleave: which machine")
    given = parser.parse_args()
    study = STUDIES[given.study]
    rows = [
        row
        for root in given.runs
        for file in sorted(root.rglob(RUN_FILE))
        for row in rows_of(
            study, file.parent, str(file.parent.relative_to(root.parent)), host=given.host
        )
    ]
    if not rows:
        parser.error("no complete run")
    add_rows(given.output or SWEEPS / study.file, pd.DataFrame(rows), study.setting.split())


if __name__ == "__main__":
    main()
