"""Run a sweep file: one engine for each group of runs, one run folder each, one summary."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from nwor_bench.conduct import EngineFactory, Prepared, run_prepared
from nwor_bench.config import SweepSpec, flag_of
from nwor_bench.dry_run import sweep_lines
from nwor_bench.engine import Engine, VllmEngine, check_arguments
from nwor_bench.errors import BenchError, ConfigError, ExitCode
from nwor_bench.memory import require_memory
from nwor_bench.pairs import ResolvedPair
from nwor_bench.records import RunStatus
from nwor_bench.runner import OnBatch
from nwor_bench.session import RUNS, PairChoice, prepare, resume_prepared
from nwor_bench.store import RUN_FILE, check_output, default_folder, read_run
from nwor_bench.sweep_file import (
    EngineGroup,
    Point,
    group_by_engine,
    load_sweep,
    make_points,
)
from nwor_bench.sweep_index import (
    DONE,
    FAILED,
    INDEX_FILE,
    INTERRUPTED,
    SweepIndex,
    write_summary,
)
from nwor_bench.versions import require_supported_vllm

ALLOWED_FLAGS = (
    *("file", "output", "resume", "dry_run", "verbose", "continue_on_error"),
    *("nvtx", "prometheus_port", "prometheus_textfile"),
)

CheckEngine = Callable[[ResolvedPair, SweepSpec], None]


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuse flags that the file decides. `given` is the command line by parameter name."""
    for name, value in given.items():
        if name not in ALLOWED_FLAGS:
            raise ConfigError.for_field(
                flag_of(name), value, "a sweep file says it: write it under [axes] or [settings]"
            )


def run_sweep(
    path: Path,
    output: Path | None = None,
    *,
    dry_run: bool = False,
    verbose: bool = False,
    continue_on_error: bool = False,
    on_batch: OnBatch | None = None,
    engine_factory: EngineFactory = VllmEngine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Run a sweep file from its beginning; returns the worst exit code of its runs.

    Raises ConfigError, before anything is started or written, for any run that cannot be; and,
    without `continue_on_error`, what the first failing run raises.
    """
    require_supported_vllm()
    console = Console()
    sweep = load_sweep(path)
    groups = group_by_engine(make_points(sweep))
    if output is not None:
        _check_output(output)
    prepared = _prepare_all(groups, console)
    if dry_run:
        for line in sweep_lines(sweep, groups, prepared):
            console.print(line, highlight=False, markup=False)
        return ExitCode.OK
    for group in groups:
        check_engine(prepared[group.points[0].number].pair, group.spec)
    now = datetime.now(UTC)
    folder = output or default_folder(RUNS, sweep.name, "", now)
    index = SweepIndex.create(folder, sweep, groups, now.isoformat(timespec="seconds"))
    how = {"verbose": verbose, "on_batch": on_batch, "whole": folder}
    conductor = _Conductor(index, prepared, console, engine_factory, how, continue_on_error)
    return conductor.run(groups)


def resume_sweep(
    folder: Path,
    path: Path | None = None,
    *,
    dry_run: bool = False,
    verbose: bool = False,
    continue_on_error: bool = False,
    on_batch: OnBatch | None = None,
    engine_factory: EngineFactory = VllmEngine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Go on with a sweep folder: runs that are done stay, others go on or begin.

    Raises ConfigError if `path` is given and says otherwise than the sweep was begun with.
    """
    require_supported_vllm()
    console = Console()
    if (folder / RUN_FILE).is_file():
        raise ConfigError.for_field(
            "--file", str(path), f"{folder} holds a single run; leave the flag out"
        )
    index = SweepIndex.open(folder)
    sweep = index.sweep
    if path is not None and load_sweep(path) != sweep:
        raise ConfigError.for_field(
            "--file", str(path), "the sweep was begun with other contents; leave the flag out"
        )
    groups = group_by_engine(make_points(sweep))
    left = [_without(group, index) for group in groups]
    left = [group for group in left if group.points]
    if not left:
        raise ConfigError.for_field("--resume", str(folder), "all of its runs are done")
    prepared = _prepare_all(left, console)
    if dry_run:
        for line in sweep_lines(sweep, left, prepared):
            console.print(line, highlight=False, markup=False)
        return ExitCode.OK
    for group in left:
        check_engine(prepared[group.points[0].number].pair, group.spec)
    how = {"verbose": verbose, "on_batch": on_batch, "whole": folder}
    conductor = _Conductor(index, prepared, console, engine_factory, how, continue_on_error)
    return conductor.run(left)


class _Conductor:
    """Runs the groups in turn, each on its own engine, and keeps the index true."""

    def __init__(
        self,
        index: SweepIndex,
        prepared: Mapping[int, Prepared],
        console: Console,
        engine_factory: EngineFactory,
        how: Mapping[str, Any],
        continue_on_error: bool,
    ):
        self._index = index
        self._prepared = prepared
        self._console = console
        self._factory = engine_factory
        self._how = how
        self._continue = continue_on_error
        self._engine: Engine | None = None
        self._codes: list[ExitCode] = []

    def run(self, groups: tuple[EngineGroup, ...] | list[EngineGroup]) -> ExitCode:
        """All groups; the summary is written however it ends."""
        try:
            for group in groups:
                for point in group.points:
                    if self._run_point(group, point) is ExitCode.INTERRUPTED:
                        return ExitCode.INTERRUPTED
                self._close()
            self._index.content["finished_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        finally:
            self._close()
            self._index.write()
            write_summary(self._index)
        self._console.print(f"Sweep folder: {self._index.folder}", soft_wrap=True)
        return max(self._codes, key=_badness, default=ExitCode.OK)

    def _run_point(self, group: EngineGroup, point: Point) -> ExitCode:
        folder = self._index.folder / point.folder
        title = f"run {point.number} of {len(self._index.content['runs'])}: {point.label}"
        self._console.rule(title, style="dim")
        try:
            code = self._measure(group, point, folder)
        except BaseException as error:
            # An engine whose batch failed may hold half of it: the next run gets a new one.
            self._close()
            text = str(error) or type(error).__name__
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
            self._index.set_run(point.number, status=status, error=text, exit_code=_code(error))
            if not self._continue or not isinstance(error, Exception):
                raise
            self._console.print(f"run {point.number} failed: {text}", style="red", markup=False)
            code = ExitCode(_code(error))
        else:
            whole = read_run(folder).header.get("status") == RunStatus.COMPLETE
            status = DONE if whole else INTERRUPTED
            self._index.set_run(point.number, status=status, error=None, exit_code=int(code))
            code = code if whole else ExitCode.INTERRUPTED
        self._codes.append(code)
        return code

    def _measure(self, group: EngineGroup, point: Point, folder: Path) -> ExitCode:
        prepared = self._prepared[point.number]

        @contextmanager
        def source(log: Path | None) -> Iterator[Engine]:
            if self._engine is None:
                self._engine = self._factory(prepared.pair, group.spec, log)
            yield self._engine

        if (folder / RUN_FILE).is_file():
            if read_run(folder).header.get("status") == RunStatus.COMPLETE:
                return ExitCode.OK  # it ended just before the index was written
            return resume_prepared(prepared, folder, source, self._console, **self._how)
        return run_prepared(prepared, folder, source, self._console, **self._how)

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _check_output(folder: Path) -> None:
    """Refuse a folder that holds a sweep or a run already, or that cannot be made."""
    if (folder / INDEX_FILE).exists():
        raise ConfigError.for_field(
            "--output", str(folder), "it already holds a sweep; name a new folder"
        )
    check_output(folder)


def _prepare_all(
    groups: tuple[EngineGroup, ...] | list[EngineGroup], console: Console
) -> dict[int, Prepared]:
    """Check every run before the first starts."""
    prepared = {}
    for group in groups:
        for point in group.points:
            ready = prepare(point.spec, PairChoice(pair=point.pair), console)
            prepared[point.number] = ready
        require_memory(ready.pair, group.spec)
    return prepared


def _without(group: EngineGroup, index: SweepIndex) -> EngineGroup:
    """The group without the runs that are done; the engine's room stays the same."""
    points = tuple(p for p in group.points if index.status(p.number) != DONE)
    return EngineGroup(group.number, group.spec, points)


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    return int(error.exit_code) if isinstance(error, BenchError) else int(ExitCode.FAILED)


def _badness(code: ExitCode) -> int:
    """Wrong numbers are worse than none."""
    order = [ExitCode.OK, ExitCode.BAD_USAGE, ExitCode.FAILED, ExitCode.CORRECTNESS_BROKEN]
    return order.index(code) if code in order else len(order)
