"""A sweep over a Ray cluster: one task for each engine, each on a GPU of its own.

Ray places the tasks (`num_gpus`; if the cluster has no GPU, one on each machine). A task measures
into a folder of its own machine and sends every finished run back, so that all end in one sweep
folder. The unfinished runs of a lost worker have failed; `--resume` starts them again.
"""

import io
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from nwor_bench.engine.engine import VllmEngine, check_arguments
from nwor_bench.engine.memory import require_memory
from nwor_bench.errors import ConfigError, EngineError, ExitCode, worst_of
from nwor_bench.records.files import DONE
from nwor_bench.run.execute import GroupEngine, Prepared, run_prepared
from nwor_bench.run.prepare import prepare
from nwor_bench.run.run_options import DEFAULT_OPTIONS, RunOptions
from nwor_bench.run.sweep_folder import FAILED, INTERRUPTED, SweepIndex
from nwor_bench.run.sweep_summary import close_sweep, failure_of, finish_sweep
from nwor_bench.workload.sweep_file import EngineGroup, Point


@dataclass(frozen=True)
class GroupTask:
    """Runs of one engine. `command` is the command line, for the records."""

    group: EngineGroup
    command: tuple[str, ...]
    continue_on_error: bool


@dataclass(frozen=True)
class RunFiles:
    """A run that ended, with all files of its folder; `error` says why it failed, if it did."""

    number: int
    exit_code: int
    files: dict[str, bytes]
    error: str | None = None


def measure_group(task: GroupTask) -> Iterator[str | RunFiles]:
    """The task of a worker: gives the machine's name, then each run of the group on one engine.

    Checks models, memory and vLLM first, as the sweep's own machine could not.
    """
    yield socket.gethostname()
    sys.argv = list(task.command)
    quiet = Console(file=io.StringIO())
    group = task.group
    prepared = {p.number: prepare(p.spec, p.choice, quiet) for p in group.points}
    pair = prepared[group.points[0].number].pair
    require_memory(pair, group.spec)
    check_arguments(pair, group.spec)
    with ExitStack() as stack:
        work = Path(stack.enter_context(TemporaryDirectory(prefix="nwor-bench-ray-")))
        engine = stack.enter_context(closing(GroupEngine(VllmEngine, group.spec)))
        for point in group.points:
            result = _measure(prepared[point.number], point, engine, work / point.folder)
            yield result
            if result.error is not None and not task.continue_on_error:
                return


def _measure(prepared: Prepared, point: Point, engine: GroupEngine, folder: Path) -> RunFiles:
    quiet, text = Console(file=io.StringIO()), None
    try:
        code = run_prepared(prepared, folder, engine.source(prepared), quiet, in_sweep=True)
    except Exception as error:
        engine.close()
        code, text = failure_of(error)
    paths = folder.iterdir() if folder.is_dir() else ()
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return RunFiles(point.number, int(code), files, text)


@dataclass(frozen=True)
class Slot:
    """Place for an engine: any free GPU of the cluster, or one whole machine without GPUs.

    `node` is that machine's Ray node; None for any GPU.
    """

    options: dict[str, Any]
    node: str | None = None


def find_slots(nodes: Sequence[dict[str, Any]], gpus_each: int, make_affinity: Any) -> list[Slot]:
    """Places for engines that run at the same time, from `ray.nodes()`.

    With GPUs one slot for each engine that they can hold; else one for each machine, which the
    engine gets as a whole. Raises ConfigError if no engine fits, and if two Ray nodes without
    GPUs share a machine: two engines on it would time each other.
    """
    alive = [node for node in nodes if node["Alive"]]
    gpus = [int(node["Resources"].get("GPU", 0)) for node in alive]
    if any(gpus):
        places = sum(count // gpus_each for count in gpus)
        if places == 0:
            raise ConfigError.for_field(
                "tensor_parallel_size", gpus_each,
                f"the cluster's nodes have {max(gpus)} GPUs at most; write {max(gpus)} or less",
            )  # fmt: skip
        return [Slot({"num_gpus": gpus_each, "num_cpus": 1})] * places
    hosts = [str(node["NodeManagerHostname"]) for node in alive]
    for host in hosts:
        if hosts.count(host) > 1:
            raise ConfigError.for_field(
                "--ray", True,
                f"{hosts.count(host)} Ray nodes run on {host}, and engines timed together on one "
                "machine would slow each other; keep one node on each machine",
            )  # fmt: skip
    return [
        Slot(
            {
                "num_cpus": node["Resources"].get("CPU", 1),
                "scheduling_strategy": make_affinity(node["NodeID"], soft=False),
            },
            node["NodeID"],
        )
        for node in alive
    ]


def require_ray() -> Any:
    """The `ray` package. Raises ConfigError if it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError.for_field(
            "--ray", True, "Ray is not installed: pip install 'nwor-bench[ray]'"
        ) from error


def check_flags_for_ray(given: Mapping[str, Any]) -> None:
    """Refuse --verbose, as engines run on other machines, and --ray without Ray.

    `given` is what the command line says, by option name.
    """
    if "verbose" in given:
        remedy = "the engines run elsewhere with --ray; leave it out"
        raise ConfigError.for_field("--verbose", given["verbose"], remedy)
    require_ray()


def run_on_ray(
    index: SweepIndex,
    groups: Iterable[EngineGroup],
    command: list[str],
    console: Console,
    options: RunOptions = DEFAULT_OPTIONS,
) -> ExitCode:
    """Run the groups on the Ray cluster of RAY_ADDRESS, or on a local one made for the purpose.

    Returns the worst exit code of the sweep's runs. Without `options.continue_on_error` the first
    failing run ends the sweep and its error is raised.
    """
    ray = require_ray()
    mine = not ray.is_initialized()
    if mine:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(log_to_driver=False)
    try:
        return _RaySweep(ray, index, command, console, options).run(groups)
    finally:
        if mine:
            ray.shutdown()


class _RaySweep:
    def __init__(
        self, ray: Any, index: SweepIndex, command: list[str], console: Console, options: RunOptions
    ):
        self._ray, self._index, self._console = ray, index, console
        self._command, self._options = command, options
        self._waiting: list[EngineGroup] = []
        self._running: dict[Any, tuple[EngineGroup, Slot]] = {}
        self._codes = [ExitCode(code) for code in index.done_codes()]

    def run(self, groups: Iterable[EngineGroup]) -> ExitCode:
        self._waiting = list(groups)
        ranks = max((g.spec.tensor_parallel_size for g in self._waiting), default=1)
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        free = find_slots(self._ray.nodes(), ranks, affinity)
        self._say(f"{len(self._waiting)} engines, {len(free)} at a time on Ray")
        try:
            while self._waiting or self._running:
                while self._waiting and free:
                    self._start(self._waiting.pop(0), free.pop())
                if not self._running:
                    raise EngineError.at(
                        "Ray", "has no machine left for the runs that are not done", joint=" "
                    )
                ready, _ = self._ray.wait(list(self._running), num_returns=1)
                free += self._take(ready[0])
            finish_sweep(self._index)
        finally:
            for stream in self._running:
                self._ray.cancel(stream, force=True)
            close_sweep(self._index, self._console, self._options)
        return worst_of(self._codes)

    def _start(self, group: EngineGroup, slot: Slot) -> None:
        """Start a task. `max_calls`: each process serves one engine, so no state is left behind."""
        task = GroupTask(group, tuple(self._command), self._options.continue_on_error)
        remote = self._ray.remote(max_calls=1, max_retries=0, **slot.options)(measure_group)
        self._running[remote.remote(task)] = (group, slot)

    def _take(self, stream: Any) -> list[Slot]:
        """Handle one message of a task; returns the slots that it frees."""
        group, slot = self._running[stream]
        try:
            message = self._ray.get(next(stream))
        except StopIteration:
            del self._running[stream]
            return [slot]
        except self._ray.exceptions.RayError as error:
            del self._running[stream]
            lost = EngineError.at("the worker was lost", str(error).strip().partition("\n")[0])
            self._fail_group(group, getattr(error, "cause", None) or lost)
            alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
            return [slot] if slot.node is None or slot.node in alive else []
        self._heed(message, group)
        return []

    def _heed(self, message: str | RunFiles, group: EngineGroup) -> None:
        if isinstance(message, str):
            self._say(f"engine {group.number} on {message}")
            return
        point = next(p for p in group.points if p.number == message.number)
        self._write(self._index.folder / point.folder, message.files)
        code, status = ExitCode(message.exit_code), DONE
        if message.error is not None:
            status = FAILED
        elif code is ExitCode.INTERRUPTED:
            status = INTERRUPTED
        self._index.set_run(message.number, status=status, error=message.error, exit_code=int(code))
        why = "" if message.error is None else f": {message.error}"
        total = len(self._index.content["runs"])
        self._say(f"run {message.number} of {total}: {point.label}: {status}{why}")
        self._codes.append(code)
        if message.error is not None and not self._options.continue_on_error:
            raise EngineError.at(f"run {message.number} ({point.label})", message.error)

    def _fail_group(self, group: EngineGroup, error: BaseException) -> None:
        """Mark the unfinished runs as failed: the worker was lost or refused them."""
        code, text = failure_of(error)
        left = [p for p in group.points if self._index.status(p.number) not in (DONE, FAILED)]
        for point in left:
            self._index.set_run(point.number, status=FAILED, error=text, exit_code=int(code))
            self._codes.append(code)
        self._say(f"engine {group.number} failed: {error}")
        if not self._options.continue_on_error:
            raise error

    def _write(self, folder: Path, files: dict[str, bytes]) -> None:
        """Move a complete run into its folder, replacing an unfinished one."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
