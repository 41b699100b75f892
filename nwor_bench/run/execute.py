"""Run one prepared run: engine, batches, records; write reports even after a failure."""

import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from rich.console import Console

from nwor_bench.analysis.analyse import Analysis, analyse
from nwor_bench.engine.protocol import Engine
from nwor_bench.errors import BenchError, EngineError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.instruments.conditions import ConditionMonitor
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.files import only_writer
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.store import RunData, RunStore, read_run
from nwor_bench.records.types import RunStatus
from nwor_bench.report.load import REPORT_PAGE, write_files
from nwor_bench.report.run_report import exit_code_of
from nwor_bench.report.terminal import print_path
from nwor_bench.report.text import plural
from nwor_bench.run import resume
from nwor_bench.run.batch_sizes import BatchSizes, NoTimeLeft
from nwor_bench.run.blocks import BlockRunner
from nwor_bench.run.progress import Progress, tell_result
from nwor_bench.run.run_options import DEFAULT_OPTIONS, RunOptions
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.prompts import Encode
from nwor_bench.workload.schedule import Plan, blocks_for_header


class Interrupts:
    """Remembers that a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.seen = False

    def check(self) -> None:
        """Raise KeyboardInterrupt (again) if a signal arrived and has not ended the run."""
        if self.seen:
            raise KeyboardInterrupt


@contextmanager
def heed_interrupts() -> Iterator[Interrupts]:
    """SIGINT and SIGTERM raise KeyboardInterrupt and are remembered; only in the main thread.

    SIGTERM too, so that results survive when a CI runner stops the job. A SIGINT that the process
    ignored from its start, like a shell's background job, stays ignored.
    """
    interrupts = Interrupts()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        interrupts.seen = True
        raise KeyboardInterrupt

    heeded = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        heeded.append(signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


LOG_FILE = "engine.log"
"""vLLM's log in a run's folder, and the traceback of what ended the run."""

EngineFactory = Callable[[ResolvedPair, RunSpec, Path | None], Engine]


@dataclass(frozen=True)
class Prepared:
    """A sweep that has been checked and can start: what runs, on which pair, in which order.

    `choice` is the pair as the command line named it, `pair` the result; `dtype_note` says why its
    dtype is not the pair file's.
    """

    spec: RunSpec
    choice: dict[str, str | None]
    pair: ResolvedPair
    plan: Plan
    encode: Encode
    dtype_note: str | None = None
    sizes: BatchSizes | None = None
    """The batch sizes that share a time budget with it; None if it has its own."""

    @property
    def notes(self) -> list[str]:
        """What to know before it runs, a line each."""
        requests, prompts = len(self.plan.gate.prompts), len(set(self.plan.gate.prompts))
        notes = [] if self.dtype_note is None else [self.dtype_note]
        if prompts < requests:
            notes.append(
                f"{plural(prompts, 'prompt')} for {requests} requests: they repeat; "
                f"add prompts, or write --requests {prompts}"
            )
        return notes


EngineSource = Callable[[Path | None], AbstractContextManager[Engine]]
"""Gives the engine for one run, started already or now; the path is for vLLM's log."""


class GroupEngine:
    """Started by the first run that asks for it; after `close` the next one gets a new engine.

    Args:
        factory: starts an engine.
        spec: the group's configuration, with room for its largest run.
        is_shared: it outlives the run; otherwise it is closed as soon as the run has been measured.
    """

    def __init__(self, factory: EngineFactory, spec: RunSpec, *, is_shared: bool = True):
        self._factory = factory
        self._spec = spec
        self._is_shared = is_shared
        self._engine: Engine | None = None
        self._log: Path | None = None

    def source(self, prepared: Prepared) -> EngineSource:
        """The engine for `run_prepared`."""

        @contextmanager
        def engine(log: Path | None) -> Iterator[Engine]:
            if self._engine is None:
                self._engine, self._log = self._factory(prepared.pair, self._spec, log), log
            elif self._log is not None and log is not None:
                for file in self._log.parent.glob("engine*.log"):  # one engine, one log
                    if not (link := log.parent / file.name).exists():
                        link.symlink_to(os.path.relpath(file, log.parent))
            try:
                yield self._engine
            finally:
                if not self._is_shared:
                    self.close()

        return engine

    def close(self) -> None:
        """Close the engine, if there is one: after a failed batch its state may be inconsistent."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def run_prepared(
    prepared: Prepared,
    folder: Path,
    source: EngineSource,
    console: Console,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    resumed: RunData | None = None,
    in_sweep: bool = False,
) -> ExitCode:
    """Measure into `folder`, a new one or that of the run `resumed`, and write the reports.

    A run `in_sweep` leaves it to the sweep to publish, and to say how to go on if the run does not
    end as planned.
    """
    plan, pair = prepared.plan, prepared.pair
    if resumed is None:
        RunStore.create(folder, _header(prepared, datetime.now(UTC)))
    with only_writer(folder):
        store = RunStore.open(folder)
        if resumed is not None:
            store.append_event(
                {"event": "resumed", "at": _now(), "warnings": list(resumed.warnings)}
            )
        log = None if options.verbose else folder / LOG_FILE

        def measure(progress: Progress, interrupts: Interrupts) -> None:
            progress.say(f"vLLM with {pair.name} (log: {log or 'this terminal'})")
            progress.doing("vLLM is starting")
            with source(log) as engine:
                interrupts.check()
                status = engine.status()
                if resumed is not None:
                    resume.check_engine(resumed, status)
                monitor = ConditionMonitor(gpus=str(status.device).startswith("cuda"))
                sweep = BlockRunner(
                    plan,
                    prepared.spec,
                    engine,
                    store,
                    prepared.encode,
                    progress,
                    monitor,
                    interrupts.check,
                )
                sweep.sizes = prepared.sizes or sweep.sizes
                _measure(sweep, status, store, progress)
                progress.doing("closing the engine")
                # Staging captured its graphs on the way: what they took is known only now.
                store.update(engine=engine.status())

        with Progress(console, options.heartbeat) as progress:
            with heed_interrupts() as interrupts:
                status, failure = _guarded(measure, store, progress, interrupts)
            progress.doing("writing the reports")
            analysis = _finish(store, status)
        console.print()
        if failure is None or options.as_json:  # an error is printed last, where it is caught
            tell_result(console, options, analysis, folder, in_sweep=in_sweep)
        else:
            print_path(console, "Report", folder / REPORT_PAGE)
        code = _exit_code(status, analysis)
        if status is not RunStatus.COMPLETE and not in_sweep:
            say_how_to_go_on(folder, console)
    if isinstance(failure, BenchError):
        raise failure
    if failure is not None:  # its traceback is in the log
        raise EngineError(f"{type(failure).__name__}: {failure}") from failure
    return code


def _header(prepared: Prepared, started_at: datetime) -> RunHeader:
    spec = prepared.spec.to_dict()
    return RunHeader(
        scenario=spec["scenario"],
        pair=PairFacts(**asdict(prepared.pair)),
        dtype_note=prepared.dtype_note,
        choice=prepared.choice,
        spec=spec,
        environment=environment.collect(),
        blocks=blocks_for_header(prepared.plan),
        command=shlex.join(["nwor-bench", *sys.argv[1:]]),
        started_at=started_at.isoformat(timespec="seconds"),
    )


def _measure(sweep: BlockRunner, status: EngineStatus, store: RunStore, progress: Progress) -> None:
    """Run the plan on a started engine; what the gate found is stored however it ends."""
    # The rule at once: looks at the intervals, and a report of a killed run, go by it.
    store.update(engine=status, parity=sweep.parity.facts())
    progress.say(
        f"engine: {status.start_seconds:.1f} s to start, {status.target_layers} target layers, "
        f"{status.attention_backend}"
    )
    began = time.perf_counter()
    try:
        sweep.run()
    finally:
        spent = (store.header.measuring_s or 0.0) + round(time.perf_counter() - began, 3)
        store.update(
            parity=sweep.parity.facts(),
            measuring_s=spent,
            spent_s=sweep.spent_s,
            stopped=sweep.stopped,
        )


def _guarded(
    measure: Callable[[Progress, Interrupts], None],
    store: RunStore,
    progress: Progress,
    interrupts: Interrupts,
) -> tuple[RunStatus, Exception | None]:
    """How measuring ended, noted in the records; the run is reported before an error goes on."""
    try:
        measure(progress, interrupts)
    except NoTimeLeft:
        return RunStatus.PARTIAL, None
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not interrupts.seen:  # code that Ctrl-C cuts short may raise an error of its own
            message = str(error) or repr(error)
            store.append_event({"event": "failed", "at": _now(), "error": message})
            log = store.folder / LOG_FILE
            with log.open("a", encoding="utf-8") as file:
                traceback.print_exception(error, file=file)
            progress.say(f"failed; traceback: {log}")
            return RunStatus.FAILED, error
    else:
        return RunStatus.COMPLETE, None
    progress.say("interrupted: keeping what was measured")
    store.append_event({"event": "interrupted", "at": _now()})
    return RunStatus.PARTIAL, None


def _finish(store: RunStore, status: RunStatus) -> Analysis:
    """Store the final status and write the reports."""
    store.finish(status, finished_at=_now())
    analysis = analyse(read_run(store.folder))
    write_files(store.folder, analysis)
    return analysis


def _exit_code(status: RunStatus, analysis: Analysis) -> ExitCode:
    code = exit_code_of(analysis)
    if status is RunStatus.PARTIAL and code is not ExitCode.CORRECTNESS_BROKEN:
        return ExitCode.INTERRUPTED
    return code


def say_how_to_go_on(folder: Path, console: Console) -> None:
    """The command that resumes a run or a sweep, in one line to be copied."""
    command = shlex.join(["nwor-bench", "sweep", "--resume", str(folder)])
    console.print(f"To go on: {command}", highlight=False, markup=False, soft_wrap=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
