"""Run a sweep file: check every run, then one engine per group, one folder per run, one summary."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from nwor_bench.analysis.analyse import analyse
from nwor_bench.engine.arms import start_engine
from nwor_bench.engine.engine import check_arguments
from nwor_bench.engine.memory import groups_with_room, require_memory
from nwor_bench.errors import ConfigError, ExitCode, worst_of
from nwor_bench.records.files import (
    DONE,
    LEFT_OUT,
    RUN_FILE,
    RUNS,
    check_output,
    default_folder,
)
from nwor_bench.records.store import read_run
from nwor_bench.records.types import RunStatus
from nwor_bench.report.run_report import exit_code_of
from nwor_bench.run.batch_sizes import BatchSizes
from nwor_bench.run.dry_run import sweep_lines
from nwor_bench.run.execute import EngineFactory, GroupEngine, Prepared, run_prepared
from nwor_bench.run.prepare import CheckEngine, prepare, ready_pair, resume_prepared
from nwor_bench.run.progress import check_vllm_version, console_for, tell_plan
from nwor_bench.run.run_options import DEFAULT_OPTIONS, RunOptions
from nwor_bench.run.sweep_folder import FAILED, INTERRUPTED, SweepIndex
from nwor_bench.run.sweep_summary import close_sweep, failure_of, finish_sweep
from nwor_bench.workload.options import declared, flag_of, names
from nwor_bench.workload.run_spec import Counters
from nwor_bench.workload.sweep_file import (
    Axes,
    EngineGroup,
    Point,
    Settings,
    SweepFile,
    group_by_engine,
    load_sweep,
    make_points,
)


class SweepRunner:
    """Runs one group after another, each on its own engine, and keeps the index up to date."""

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
        return worst_of(self._codes)

    def _is_left_out(self, point: Point) -> bool:
        """True for a batch size that the time budget has no room for; noted in the index."""
        sizes = self._prepared[point.number].sizes
        if sizes is None or sizes.has_room(point.spec.scenario.requests):
            return False
        self._index.set_run(point.number, status=LEFT_OUT)
        return True

    def _run_point(self, engine: GroupEngine, point: Point) -> ExitCode:
        if self._is_left_out(point):
            return ExitCode.OK
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
            header, sizes = read_run(folder).header, self._prepared[point.number].sizes
            left_out = self._is_left_out(point)
            if sizes is not None:
                sizes.finish(point.spec.scenario.requests, header.measuring_s or 0.0)
            if left_out:
                return ExitCode.OK
            whole = header.status is RunStatus.COMPLETE
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
                return exit_code_of(analyse(run))
            execute = resume_prepared
        else:
            execute = run_prepared
        return execute(prepared, folder, source, self._console, self._options, in_sweep=True)


def check_flags(given: Mapping[str, Any]) -> None:
    """Refuse flags that the sweep file sets and, with --ray, flags about this process.

    `given` has the command line's values by option name.
    """
    allowed = names(declared(RunOptions))
    for name, value in given.items():
        if name not in allowed:
            raise ConfigError.for_field(flag_of(name), value, _instead_of(name))
    if given.get("ray"):
        from nwor_bench.run.ray_sweep import check_flags_for_ray

        check_flags_for_ray(given)


def _instead_of(flag: str) -> str:
    """The place in a sweep file that replaces the flag of that name."""
    for table, model in (("axes", Axes), ("settings", Settings)):
        for name in (flag, f"{flag}s"):
            if name in model.model_fields:
                return f"the sweep file says it: write it as `{name}` under [{table}]"
    return "--file cannot take it: leave it out, or sweep only that run"


def run_loaded(
    sweep: SweepFile,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    engine_factory: EngineFactory = start_engine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Run a sweep from its beginning; return the worst exit code of its runs.

    With `options.ray` the engines run on a Ray cluster, and its machines check them.

    Raises ConfigError for any invalid run, before anything is started or written. Without
    `continue_on_error` the first failing run's error is raised.
    """
    console = console_for(options)
    check_vllm_version(console)
    if options.output is not None:
        check_output(options.output)
    sweep = _in_groups(sweep, console) if sweep.settings.engines and not options.ray else sweep
    groups = group_by_engine(make_points(sweep))
    prepared = _checked(sweep, groups, console, options, check_engine)
    if options.dry_run:
        tell_plan(options, sweep_lines(sweep, groups, prepared))
        return ExitCode.OK
    now = datetime.now(UTC)
    folder = options.output or default_folder(RUNS, sweep.name, "", now)
    index = SweepIndex.create(folder, sweep, groups, now.isoformat(timespec="seconds"))
    return _run(index, groups, prepared, console, options, engine_factory)


def _in_groups(sweep: SweepFile, console: Console) -> SweepFile:
    """The sweep with an axis for its engines if memory has no room for all of them at once."""
    whole = group_by_engine(make_points(sweep))[0]
    pair, _ = ready_pair(whole.points[0].spec, whole.points[0].choice, console)
    names = tuple(str(each.engines_at_once) for each in groups_with_room(pair, whole.spec))
    if len(names) < 2:
        return sweep
    line = f"memory has no room for all engines at once: {', then '.join(names)}"
    console.print(f"{line}, each with plain decoding", highlight=False, soft_wrap=True)
    axes = sweep.axes.model_copy(update={"engines_at_once": names})
    return sweep.model_copy(update={"axes": axes})


def resume_sweep(
    folder: Path,
    path: Path | None = None,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    engine_factory: EngineFactory = start_engine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Resume a sweep folder: finished runs are kept, others are resumed or started.

    With `options.ray` an interrupted run starts again from its beginning.

    Raises ConfigError if `path` is given and differs from the sweep's own configuration.
    """
    console = console_for(options)
    check_vllm_version(console)
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
    index.check_runs(groups)
    index.require_unfinished()
    left = []
    for group in groups:  # an engine's capacity stays the same
        points = tuple(p for p in group.points if index.status(p.number) != DONE)
        if points:
            left.append(EngineGroup(group.number, group.spec, points))
    prepared = _checked(sweep, left, console, options, check_engine)
    if options.dry_run:
        tell_plan(options, sweep_lines(sweep, left, prepared))
        return ExitCode.OK
    return _run(index, left, prepared, console, options, engine_factory)


def _checked(
    sweep: SweepFile,
    groups: Sequence[EngineGroup],
    console: Console,
    options: RunOptions,
    check_engine: CheckEngine,
) -> dict[int, Prepared]:
    """Check every run of the groups before the first starts; the runs by number.

    Memory and engines are checked where they run, with Ray by its workers; a dry run starts none.
    """
    if options.ray and sweep.settings.counters == Counters.DRAM:
        raise ConfigError.for_field(
            "--ray", True,  # a worker starts with the libcupti that PyTorch brings
            "a Ray worker cannot read DRAM counters (counters under [settings]); leave --ray "
            "out, or begin a sweep without counters",
        )  # fmt: skip
    several = [name for name in ("against", "engines") if getattr(sweep.settings, name)]
    if options.ray and several:
        remedy = (
            f"a Ray worker runs one engine ({several[0]} under [settings] asks for more); leave it "
            "out"
        )
        raise ConfigError.for_field("--ray", True, remedy)
    prepared = {}
    for point in (point for group in groups for point in group.points):
        try:
            prepared[point.number] = prepare(point.spec, point.choice, console)
        except ConfigError as error:
            raise error.of_run(point.number, point.label) from None
    pairs = [(group, prepared[group.points[0].number].pair) for group in groups]
    if not options.ray:
        for group, pair in pairs:
            try:
                require_memory(pair, group.spec)
            except ConfigError as error:
                raise error.within(f"engine {group.number} ({pair.name})") from error
    for note in sorted({note for run in prepared.values() for note in run.notes}):
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    if not options.ray and not options.dry_run:
        for group, pair in pairs:
            check_engine(pair, group.spec)
    return prepared


def _run(
    index: SweepIndex,
    groups: Sequence[EngineGroup],
    prepared: Mapping[int, Prepared],
    console: Console,
    options: RunOptions,
    engine_factory: EngineFactory,
) -> ExitCode:
    """Run the groups here or on Ray."""
    if options.ray:
        from nwor_bench.run.ray_sweep import run_on_ray

        return run_on_ray(index, groups, sys.argv, console, options)
    prepared = _with_shared_time(groups, prepared)
    return SweepRunner(index, prepared, console, engine_factory, options).run(groups)


def _with_shared_time(
    groups: Sequence[EngineGroup], prepared: Mapping[int, Prepared]
) -> dict[int, Prepared]:
    """Runs of draft counts know the batch sizes that have the same time budget: all that differ in
    nothing else."""
    shared: dict[tuple[object, ...], list[Point]] = {}
    for point in (point for group in groups for point in group.points):
        if point.spec.experiment.compares_drafts and point.spec.time_budget_s is not None:
            place = {**point.axes, "requests": None}
            shared.setdefault(tuple(place.values()), []).append(point)
    found = dict(prepared)
    for points in shared.values():
        seconds = sum(point.spec.time_budget_s or 0.0 for point in points)
        sizes = BatchSizes(seconds, [point.spec.scenario.requests for point in points])
        found |= {p.number: replace(prepared[p.number], sizes=sizes) for p in points}
    return found
