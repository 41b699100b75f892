"""summary.csv and summary.md of a sweep folder: all of its runs side by side."""

import pandas as pd

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.analysis.parity.batches import REFERENCE
from nwor_bench.records.store import read_run, write_atomically
from nwor_bench.records.types import CellResult
from nwor_bench.report.text import ratio
from nwor_bench.run.sweep_index import SweepIndex

_SHOWN = (
    "nwor_mode", "scv_mode", "arm", "verdict", "ratio_to_off", "ratio_ci_low", "ratio_ci_high",
    "compared", "smallest_effect", "window_ms_mean", "latency_ms_p50", "tokens_per_s",
    "acceptance_rate", "batches", "parity",
)  # fmt: skip
_AXES = (
    "number", "pair", "scenario", "draft_tokens", "requests", "temperature", "dtype",
    "cache_dtype", "acceptance_length", "status",
)  # fmt: skip


def write_summary(index: SweepIndex) -> str:
    """summary.csv (one row a run and cell) and summary.md (one row a run), from the records.

    Returns what summary.md says.
    """
    rows, lines = [], []
    for run in index.content["runs"]:
        place = {name: run.get(name) for name in _AXES}
        folder = index.folder / run["folder"]
        cells = summarise(read_run(folder)) if (folder / "run.json").is_file() else []
        for cell in cells:
            shown = {name: getattr(cell, name) for name in _SHOWN}
            rows.append({**place, **shown, "folder": run["folder"]})
        if not cells:
            rows.append({**place, "folder": run["folder"]})
        lines.append({**place, **{cell.label: _outcome(cell) for cell in cells},
                      "error": run["error"]})  # fmt: skip
    frame = pd.DataFrame(rows, dtype=object)
    write_atomically(index.folder / "summary.csv", frame.to_csv(index=False, lineterminator="\n"))
    text = _summary_text(index.content["name"], pd.DataFrame(lines, dtype=object))
    write_atomically(index.folder / "summary.md", text)
    return text


def _outcome(cell: CellResult) -> str:
    """`FASTER 0.972 [0.970, 0.974]`; of off x off itself, its time."""
    if cell.ratio_to_off is None and cell.verdict == REFERENCE and cell.window_ms_mean:
        return f"{cell.window_ms_mean:.2f} ms a window"
    return str(cell.verdict) if cell.ratio_to_off is None else f"{cell.verdict} {ratio(cell)}"


def _summary_text(name: str, table: pd.DataFrame) -> str:
    """One row a run; what is the same in all of several runs stands above the table."""
    table = table.dropna(axis="columns", how="all")
    same = [axis for axis in _AXES if axis in table and table[axis].nunique(dropna=False) == 1]
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
    return f"# nwor-bench sweep: {name}\n\n{note}{grid}\n\n{legend}\n"
