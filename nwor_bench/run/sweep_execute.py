"""Run a sweep: one engine for each group of runs, one run folder each, one summary."""

from collections.abc import Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.records.run_folder import RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.records.types import RunStatus
from nwor_bench.run.execute import (
    EngineFactory,
    Prepared,
    run_prepared,
    say_how_to_go_on,
    worst_of,
)
from nwor_bench.run.group_engine import GroupEngine
from nwor_bench.run.output import tell_json
from nwor_bench.run.prepare import resume_prepared
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep_folder import DONE, FAILED, INTERRUPTED, SweepIndex
from nwor_bench.run.sweep_summary import sweep_result, swept_runs, write_summary
from nwor_bench.workload.sweep_points import EngineGroup, Point


class SweepRunner:
    """Runs the groups in turn, each on its own engine, and keeps the index up to date."""

    def __init__(
        self,
        index: SweepIndex,
        prepared: Mapping[int, Prepared],
        console: Console,
        engine_factory: EngineFactory,
        options: RunOptions,
    ):
        self._index = index
        self._prepared = prepared
        self._console = console
        self._factory = engine_factory
        self._options = options
        self._codes = [ExitCode(code) for code in index.done_codes()]

    def run(self, groups: Iterable[EngineGroup]) -> ExitCode:
        """Run all groups; write the summary even after a failure.

        Returns the worst exit code of the sweep's runs, earlier starts included.
        """
        try:
            for group in groups:
                with closing(GroupEngine(self._factory, group.spec)) as engine:
                    for point in group.points:
                        if self._run_point(engine, point) is ExitCode.INTERRUPTED:
                            return ExitCode.INTERRUPTED
            finish_sweep(self._index)
        finally:
            close_sweep(self._index, self._console, self._options)
        return worst_code(self._codes)

    def _run_point(self, engine: GroupEngine, point: Point) -> ExitCode:
        folder = self._index.folder / point.folder
        title = f"run {point.number} of {len(self._index.content['runs'])}: {point.label}"
        self._console.rule(title, style="dim")
        try:
            code = self._measure(engine, point, folder)
        except BaseException as error:
            engine.close()
            code, text = failure_of(error)
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
            self._index.set_run(point.number, status=status, error=text, exit_code=int(code))
            if not self._options.continue_on_error or not isinstance(error, Exception):
                raise
            self._console.print(f"run {point.number} failed: {text}", style="red", markup=False)
        else:
            whole = read_run(folder).header.status is RunStatus.COMPLETE
            status = DONE if whole else INTERRUPTED
            self._index.set_run(point.number, status=status, error=None, exit_code=int(code))
            code = code if whole else ExitCode.INTERRUPTED
        self._codes.append(code)
        return code

    def _measure(self, engine: GroupEngine, point: Point, folder: Path) -> ExitCode:
        prepared = self._prepared[point.number]
        source = engine.source(prepared)
        if (folder / RUN_FILE).is_file():
            run = read_run(folder)
            if run.header.status is RunStatus.COMPLETE:  # just before the index was written
                return worst_of(summarise(run))
            execute = resume_prepared
        else:
            execute = run_prepared
        return execute(prepared, folder, source, self._console, self._options, in_sweep=True)


def finish_sweep(index: SweepIndex) -> None:
    """Mark the sweep as finished: every run has been tried."""
    index.content["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")


def close_sweep(index: SweepIndex, console: Console, options: RunOptions) -> None:
    """Write index and summary, even after a failure, and print their paths."""
    index.write()
    summary = write_summary(index)
    if options.as_json:
        tell_json(sweep_result(index, swept_runs(index)))
    line = f"Sweep folder: {index.folder}"
    shown = Console() if options.quiet and not options.as_json else console
    shown.print(line, highlight=False, markup=False, soft_wrap=True)
    if not index.is_done:
        say_how_to_go_on(index.folder, console)
    if options.publish is not None:
        options.publish(summary)


def failure_of(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code of a run that raised, and its entry in the index."""
    text = str(error) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, text
    return error.exit_code if isinstance(error, BenchError) else ExitCode.FAILED, text


def worst_code(codes: Iterable[ExitCode]) -> ExitCode:
    """The exit code of a sweep, from those of its runs."""
    return max(codes, key=_badness, default=ExitCode.OK)


def _badness(code: ExitCode) -> int:
    """Sort key of exit codes: wrong numbers are worse than none."""
    order = [ExitCode.OK, ExitCode.BAD_USAGE, ExitCode.FAILED, ExitCode.CORRECTNESS_BROKEN]
    return order.index(code) if code in order else len(order)
