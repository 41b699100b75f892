"""The summary of a sweep: summary.csv, summary.md and summary.html show all runs side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.analysis.parity.batches import REFERENCE
from nwor_bench.records.disk import write_atomically
from nwor_bench.records.run_folder import RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.records.types import CellResult
from nwor_bench.report.html.page import render_html
from nwor_bench.report.result_json import run_result
from nwor_bench.report.sweep.document import sweep_answer, sweep_document
from nwor_bench.report.sweep.swept_run import SweptRun
from nwor_bench.report.text import ratio
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.workload.run_spec import AXES

SUMMARY_PAGE = "summary.html"

_SHOWN = (
    "nwor_mode", "scv_mode", "arm", "verdict", "ratio_to_off", "ratio_ci_low", "ratio_ci_high",
    "compared", "smallest_effect", "window_ms_mean", "latency_ms_p50", "tokens_per_s",
    "acceptance_rate", "batches", "parity",
)  # fmt: skip
AXIS_NAMES = ("pair", "scenario", *(option.name for option, _ in AXES))
_PLACE = ("number", *AXIS_NAMES, "status")
"""Columns that identify a run."""


def write_summary(index: SweepIndex, runs: Sequence[SweptRun] | None = None) -> str:
    """summary.csv (one row a run and cell), summary.md (one row a run) and summary.html.

    Returns the text of summary.md. `runs` are those of `swept_runs`, None to read them here.
    """
    runs = swept_runs(index) if runs is None else runs
    rows, lines = [], []
    for run, entry in zip(runs, index.content["runs"], strict=True):
        place = {name: entry.get(name) for name in _PLACE}
        for cell in run.cells:
            shown = {name: getattr(cell, name) for name in _SHOWN}
            rows.append({**place, **shown, "folder": run.folder})
        if not run.cells:
            rows.append({**place, "folder": run.folder})
        lines.append({**place, **{cell.label: _outcome(cell) for cell in run.cells},
                      "error": run.error})  # fmt: skip
    frame = DataFrame(rows, dtype=object)
    write_atomically(index.folder / "summary.csv", frame.to_csv(index=False, lineterminator="\n"))
    name, answer = index.content["name"], sweep_answer(runs)
    text = _summary_text(name, ": ".join(answer), DataFrame(lines, dtype=object))
    write_atomically(index.folder / SUMMARY_PAGE, render_html(sweep_document(name, runs)))
    write_atomically(index.folder / "summary.md", text)
    return text


def swept_runs(index: SweepIndex) -> tuple[SweptRun, ...]:
    """Every run of the sweep with its records, in the order of their numbers."""
    runs = []
    for entry in index.content["runs"]:
        folder = index.folder / entry["folder"]
        data = read_run(folder) if (folder / RUN_FILE).is_file() else None
        runs.append(SweptRun(
            number=entry["number"],
            folder=entry["folder"],
            place={name: entry.get(name) for name in AXIS_NAMES},
            words=words_of(entry),
            status=entry["status"],
            error=entry["error"],
            data=data,
            cells=() if data is None else tuple(summarise(data)),
        ))  # fmt: skip
    return tuple(runs)


def words_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """A run's place on the axes for people, by the axis' name."""
    values = {option.name: (axis.label, entry.get(option.name)) for option, axis in AXES}
    named = {
        name: _counted(text, value) for name, (text, value) in values.items() if value is not None
    }
    return {"pair": Path(entry["pair"]).stem, "scenario": Path(entry["scenario"]).stem, **named}


def _counted(text: str, value: Any) -> str:
    """`8 requests`, `1 request`."""
    return text.format(value).removesuffix("s" if value == 1 else "")


def _outcome(cell: CellResult) -> str:
    """Result such as `FASTER 0.972 [0.970, 0.974]`; for off x off its time."""
    if cell.ratio_to_off is None and cell.verdict == REFERENCE and cell.window_ms_mean:
        return f"{cell.window_ms_mean:.2f} ms a window"
    return str(cell.verdict) if cell.ratio_to_off is None else f"{cell.verdict} {ratio(cell)}"


def _summary_text(name: str, answer: str, table: DataFrame) -> str:
    """One row per run; values that all runs share are listed above the table."""
    table = table.dropna(axis="columns", how="all")
    same = [axis for axis in _PLACE if axis in table and table[axis].nunique(dropna=False) == 1]
    if len(table) == 1:
        same = []
    alike = ", ".join(f"{axis} {table[axis].iloc[0]}" for axis in same)
    body = table.drop(columns=same).fillna("").astype(str)
    grid = body.to_markdown(index=False, tablefmt="pipe", disable_numparse=True)
    note = f"All runs: {alike}.\n\n" if alike else ""
    legend = (
        "Time per window over that of off x off, with each cell's own 95 % interval: below 1 is "
        "faster."
    )
    return f"# nwor-bench sweep: {name}\n\n**{answer}**\n\n{note}{grid}\n\n{legend}\n"


def sweep_result(index: SweepIndex, runs: Sequence[SweptRun]) -> dict[str, Any]:
    """The sweep as JSON for scripts: its answer, and the result of each run with its place."""
    badge, sentence = sweep_answer(runs)
    entries = []
    for entry, run in zip(index.content["runs"], runs, strict=True):
        folder = index.folder / run.folder
        result = None if run.data is None else run_result(run.data, run.cells, folder)
        entries.append({**entry, "result": result})
    return {
        "folder": str(index.folder),
        "name": index.content["name"],
        "answer": {"badge": badge, "sentence": sentence},
        "runs": entries,
    }
