"""The end of a sweep: its exit code, and summary.csv, summary.md and summary.html of all runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pandas import DataFrame
from rich.console import Console

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.records.files import RUN_FILE, write_atomically
from nwor_bench.records.store import read_run
from nwor_bench.report.document import Document
from nwor_bench.report.html import render_html
from nwor_bench.report.load import run_result
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.sweep import (
    SweptRun,
    sweep_answer,
    sweep_document,
    swept_check,
    swept_worths,
)
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.report.worth import worth_result, worth_rows
from nwor_bench.run.execute import say_how_to_go_on
from nwor_bench.run.progress import tell_json
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep_folder import FAILED, SweepIndex
from nwor_bench.workload.run_spec import AXES
from nwor_bench.workload.sweep_file import short_name

SUMMARY_PAGE = "summary.html"

_SHOWN = (
    "nwor_mode", "scv_mode", "arm", "verdict", "ratio_to_off", "ratio_ci_low", "ratio_ci_high",
    "compared", "smallest_effect", "window_ms_mean", "latency_ms_p50", "tokens_per_s",
    "acceptance_rate", "batches", "parity", "tokens_per_s_ratio", "tokens_per_s_ratio_low",
    "tokens_per_s_ratio_high",
)  # fmt: skip
AXIS_NAMES = ("pair", "scenario", *(option.name for option, _ in AXES))
_PLACE = ("number", *AXIS_NAMES, "status")
"""Columns that identify a run."""


Worths = Mapping[str, MeasuredWorth]
"""What `swept_worths` finds: by scenario; empty for runs that compare modes."""


def write_summary(index: SweepIndex, runs: Sequence[SweptRun], worths: Worths) -> Document:
    """summary.csv (one row a run and cell), summary.md (its short form) and summary.html, whose
    content it returns; of draft counts worth.csv too.

    `runs` are those of `swept_runs`, `worths` what `swept_worths` finds in them.
    """
    rows = []
    for run, entry in zip(runs, index.content["runs"], strict=True):
        place = {name: entry.get(name) for name in _PLACE}
        for cell in run.cells:
            shown = {name: getattr(cell, name) for name in _SHOWN}
            rows.append({**place, **shown, "folder": run.folder})
        if not run.cells:
            rows.append({**place, "folder": run.folder})
    frame = DataFrame(rows, dtype=object)
    write_atomically(index.folder / "summary.csv", frame.to_csv(index=False, lineterminator="\n"))
    if worths:
        rates = [
            {"scenario": name, **row} for name, worth in worths.items() for row in worth_rows(worth)
        ]
        text = DataFrame(rates, dtype=object).to_csv(index=False, lineterminator="\n")
        write_atomically(index.folder / "worth.csv", text)
    document = sweep_document(index.content["name"], runs, worths)
    text = render_markdown(document.shortened(f"Figures and times are in {SUMMARY_PAGE}."))
    write_atomically(index.folder / SUMMARY_PAGE, render_html(document))
    write_atomically(index.folder / "summary.md", text)
    return document


def swept_runs(index: SweepIndex) -> tuple[SweptRun, ...]:
    """Every run of the sweep with its records, in the order of their numbers."""
    runs = []
    for entry in index.content["runs"]:
        folder = index.folder / entry["folder"]
        data = read_run(folder) if (folder / RUN_FILE).is_file() else None
        label = {"label": entry["label"]} if "label" in entry else {}
        runs.append(SweptRun(
            number=entry["number"],
            folder=entry["folder"],
            place=label | {name: entry.get(name) for name in AXIS_NAMES},
            words=label | words_of(entry),
            status=entry["status"],
            error=entry["error"],
            analysis=None if data is None else analyse(data),
        ))  # fmt: skip
    return tuple(runs)


def words_of(entry: Mapping[str, Any]) -> dict[str, str]:
    """A run's place on the axes for people, by the axis' name."""
    values = {option.name: (axis, entry.get(option.name)) for option, axis in AXES}
    named = {name: axis.words(value) for name, (axis, value) in values.items() if value is not None}
    scenario = Path(entry["scenario"]).stem
    return {"pair": short_name(entry["pair"]), "scenario": scenario, **named}


def sweep_result(index: SweepIndex, runs: Sequence[SweptRun], worths: Worths) -> dict[str, Any]:
    """The sweep as JSON for scripts: its answer, and the result of each run with its place."""
    headline, check = sweep_answer(runs, worths), swept_check(runs)
    told = [{"scenario": name, **worth_result(worth)} for name, worth in worths.items()]
    entries = []
    for entry, run in zip(index.content["runs"], runs, strict=True):
        folder = index.folder / run.folder
        result = None if run.analysis is None else run_result(run.analysis, folder)
        entries.append({**entry, "result": result})
    return {
        "folder": str(index.folder),
        "name": index.content["name"],
        "answer": {"badge": headline.badge, "sentence": headline.sentence},
        **({"worth": told} if told else {}),
        **({} if check is None else {"check": check.to_dict()}),
        "runs": entries,
    }


def finish_sweep(index: SweepIndex) -> None:
    """Mark the sweep as finished: every run has been tried."""
    index.content["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")


def close_sweep(index: SweepIndex, console: Console, options: RunOptions) -> None:
    """Write index and summary, even after a failure, and print their paths."""
    index.write()
    shown = Console() if options.quiet else console
    failed = any(run["status"] == FAILED for run in index.content["runs"])
    if failed and not index.done_codes() and not options.continue_on_error:
        shown = Console(quiet=True)  # the error is printed last, where it is caught
    tell_sweep(shown, options, index)
    if not index.is_done:
        say_how_to_go_on(index.folder, console)


def tell_sweep(console: Console, options: RunOptions, index: SweepIndex) -> tuple[SweptRun, ...]:
    """Write a sweep's summary, print its first screen and where the whole is; returns its runs."""
    runs = swept_runs(index)
    worths = swept_worths(runs)
    document = write_summary(index, runs, worths)
    if options.as_json:
        tell_json(sweep_result(index, runs, worths))
        return runs
    shown = document.shortened() if options.verbose else replace(document, sections=())
    print_document(console, shown, quiet=options.quiet)
    print_path(console, "Report", index.folder / SUMMARY_PAGE)
    return runs


def failure_of(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code of a run that raised, and its entry in the index."""
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, text
    return error.exit_code if isinstance(error, BenchError) else ExitCode.FAILED, text
