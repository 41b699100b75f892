"""What Nsight Systems saw of a run's windows, beside the run's own record and PyTorch's profiler.

    python tests/benchmarks/nsys_cross_check.py EXPORT RUN --kineto RUN... --output FILE.md

EXPORT is the SQLite export of `nwor-bench profile nsys -- sweep ... --output RUN`; runs with
--launch-counts hold PyTorch's counts (Kineto). Writes tables and sentences; no number is typed.
"""

import argparse
import shlex
import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean

import pandas as pd
from run_machine import machine_of

from nwor_bench.instruments.launches import KINDS, HostCall, kind_of
from nwor_bench.instruments.nsight.nsys_export import NsysExport, read_export
from nwor_bench.instruments.nsight.nsys_findings import settled
from nwor_bench.instruments.nsight.nsys_windows import NsysWindow, windows_of
from nwor_bench.instruments.nsight.tables import by_cell
from nwor_bench.records.json_part import to_json
from nwor_bench.records.store import read_header
from nwor_bench.records.types import SETTLING

TEXT = """# Windows under Nsight Systems

    nwor-bench profile nsys -- {sweep}
    python tests/benchmarks/nsys_cross_check.py EXPORT RUN --kineto {kineto} --output {output}

{machine}; Nsight Systems {version}, export
schema {schema}. The first timed block alone was traced, {batches} batches; means are over windows
of all requests but for the first {settling} of a batch. Three other engines ran on the machine, on
GPUs of their own.

{cells}

- `host ms`: from a window's start to the next one's; `wait ms`: of that, in calls that wait for the
  GPU. `busy ms`, `idle ms`: the GPU's, from a window's first work to the next one's.
- `gpu operations`: kernels, copies and fills, in graphs and outside of them ({inside} of all
  that was traced ran inside graphs). What passes between two of a graph's nodes counts as idle.
- `stage x off` reads its mask on the host: one wait more, in a copy to memory that is not pinned.
  With validation in a graph there is a graph launch more instead, and no such wait.

## Against the run's own windows.csv

{own}

Traced is a window's time from its NVTX range over that in windows.csv: the same host, two clocks.
The cost of tracing is the traced block's windows over the same cell's untraced blocks; it holds
what else the machine did meanwhile.

## Against PyTorch's profiler

Counts are of the runs' windows of all requests; a number in brackets is how many windows had it.

{kineto_table}

- Launches, graph launches and waits agree wherever both profilers saw a cell.
- Copies: Nsight Systems sees the driver's own calls too, {driver}. PyTorch's
  profiler records the runtime's: without the driver's copies (column `of the runtime`) both agree.
- Counts are one higher where vLLM writes new blocks into its block table (`_apply_write_kernel`).
  The last window of a batch is left out: for PyTorch's profiler it ends with the batch, with more
  waits; here it has no end.
- Graph launches traced: {launches}, those with work on the GPU in the export: {with_work}. Launches
  outside of graphs: {plain_launches}, kernels outside of graphs: {plain_kernels}.
"""

WORK = ("KERNEL", "MEMCPY", "MEMSET")
RATIO = "{:.3f} to {:.3f}"


def cell_names(frame: pd.DataFrame) -> pd.Series:
    """`stage x graph`, the A/A arm by its own name, as in reports."""
    arms = frame["arm"].fillna("").map(lambda arm: f" ({arm})" if arm else "")
    return frame["nwor_mode"] + " x " + frame["scv_mode"] + arms


def read_windows(run: Path) -> pd.DataFrame:
    """windows.csv with a column `cell`."""
    frame = pd.read_csv(run / "windows.csv")
    frame["cell"] = cell_names(frame)
    return frame


def own_times(windows: Sequence[NsysWindow], run: Path) -> pd.DataFrame:
    """Traced times over the run's own, and over those of untraced blocks."""
    frame = read_windows(run)
    own = frame.set_index(["batch", "window"])["wall_ms"]
    traced = {w.batch for w in windows}
    timed = frame[(frame["block"] > 0) & (frame["window"] >= SETTLING)]
    full = timed[timed["num_reqs"] == timed["num_reqs"].max()]
    batches = pd.read_csv(run / "batches.csv").set_index("batch")["phase"]
    untraced = full[~full["batch"].isin(traced) & (full["batch"].map(batches) == "timed")]
    rows = []
    for cell in dict.fromkeys(w.cell for w in windows):
        mine = [w for w in windows if w.cell == cell and w.host_ms is not None]
        ratios = [w.host_ms / own[w.batch, w.window] for w in mine if own[w.batch, w.window] > 0]
        steady = fmean(w.host_ms for w in settled(mine) if w.host_ms is not None)
        blocks = untraced[untraced["cell"] == cell].groupby("block")["wall_ms"].mean()
        costs = sorted(steady / blocks)
        rows.append(
            {
                "cell": cell,
                "windows": len(ratios),
                "traced / own": RATIO.format(min(ratios), max(ratios)),
                "traced / untraced blocks": RATIO.format(costs[0], costs[-1]) if costs else "",
            }
        )
    return pd.DataFrame(rows)


def tally(values: Sequence[int]) -> str:
    """`100 (12), 101 (10)`."""
    counts = Counter(int(value) for value in values)
    return ", ".join(f"{value} ({counts[value]})" for value in sorted(counts))


def runtime_copies(export: NsysExport, window: NsysWindow) -> int:
    """A window's copies by CUDA's runtime alone, as PyTorch's profiler counts them."""
    return sum(call.name.startswith("cuda") for call in copies_of(export, window))


def copies_of(export: NsysExport, window: NsysWindow) -> list[HostCall]:
    """The asynchronous copies that a window called."""
    ranges = [r for r in export.ranges if r.name == "batch" and r.payload == window.batch]
    start = next(
        r.start_ns
        for r in export.ranges
        if r.name == "window"
        and r.payload == window.window
        and ranges[0].start_ns <= r.start_ns < ranges[0].end_ns
    )
    end = start + round((window.host_ms or 0) * 1e6)
    return [
        call
        for calls in (export.calls or {}).values()
        for call in calls
        if start <= call.start_ns < end and kind_of(call.name) == "async_copies"
    ]


def kineto_table(
    export: NsysExport, windows: Sequence[NsysWindow], runs: Sequence[Path]
) -> pd.DataFrame:
    """Counts by cell and profiler."""
    rows = []
    for cell in dict.fromkeys(w.cell for w in windows):
        mine = [w for w in settled(windows) if w.cell == cell and w.counts is not None]
        counts = {kind: tally([w.counts[kind] for w in mine if w.counts]) for kind in KINDS}
        runtime = tally([runtime_copies(export, w) for w in mine])
        rows.append({"cell": cell, "by": "Nsight Systems", **counts, "of the runtime": runtime})
        for run in runs:
            frame = read_windows(run).dropna(subset=list(KINDS))
            full = frame[(frame["cell"] == cell) & (frame["num_reqs"] == frame["num_reqs"].max())]
            full = full[full["window"].between(SETTLING, full["window"].max() - 1)]
            if len(full):
                counts = {kind: tally(list(full[kind])) for kind in KINDS}
                runtime = counts["async_copies"]
                rows.append({"cell": cell, "by": run.name, **counts, "of the runtime": runtime})
    return pd.DataFrame(rows)


def inside_graphs(path: Path) -> tuple[float, int, int]:
    """Share of GPU work inside graphs, graph launches with work, kernels outside of graphs."""
    with closing(sqlite3.connect(path)) as database:
        rows = [
            (table, number, node)
            for table in WORK
            for number, node in database.execute(
                f"SELECT correlationId, graphNodeId FROM CUPTI_ACTIVITY_KIND_{table}"
            )
        ]
    inside = [number for _, number, node in rows if node is not None]
    plain = sum(table == "KERNEL" and node is None for table, _, node in rows)
    return len(inside) / len(rows), len(set(inside)), plain


def markdown(frame: pd.DataFrame) -> str:
    """A table, three decimals where there are any."""
    return frame.to_markdown(index=False, floatfmt=".3f")


def text_of(path: Path, run: Path, runs: Sequence[Path], output: Path) -> str:
    """The whole note."""
    export, header = read_export(path), read_header(run)
    windows = windows_of(export)
    calls = [call for own in (export.calls or {}).values() for call in own]
    share, with_work, plain = inside_graphs(path)
    kinds = Counter(kind_of(call.name) for call in calls)
    driver = {
        call.name
        for call in calls
        if kind_of(call.name) == "async_copies" and not call.name.startswith("cuda")
    }
    cells = pd.DataFrame(by_cell([w.row() for w in settled(windows)]))
    return TEXT.format(
        sweep=header.command.removeprefix("nwor-bench ").replace(f" --output {run}", ""),
        kineto=shlex.join(each.name for each in runs),
        output=output,
        machine=machine_of(to_json(header)),
        version=export.version,
        schema=export.schema,
        batches=len({w.batch for w in windows}),
        settling=SETTLING,
        cells=markdown(cells.rename(columns=lambda name: str(name).replace("_", " "))),
        inside=f"{100 * share:.0f} %",
        own=markdown(own_times(windows, run)),
        kineto_table=markdown(kineto_table(export, windows, runs)),
        driver=", ".join(f"`{name}`" for name in sorted(driver)),
        launches=kinds["graph_launches"],
        with_work=with_work,
        plain_launches=kinds["kernel_launches"],
        plain_kernels=plain,
    )


def main() -> None:
    """Write the note."""
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--kineto", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    text = text_of(given.export, given.run, given.kineto, given.output)
    given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
