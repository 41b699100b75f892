"""A sweep over a Ray cluster: one task for each engine, each on a GPU of its own.

Ray places the tasks (`num_gpus`; where the cluster has no GPU, whole machines in turn); each
measures into a folder of its own machine and sends every finished run back, so that all end in
one sweep folder. If a worker is lost, its unfinished runs start again on another.
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from nwor_bench.errors import ConfigError, EngineError, ExitCode
from nwor_bench.run.ray_worker import Failed, GroupTask, Placed, RunFiles, measure_group
from nwor_bench.run.run_options import DEFAULT_OPTIONS, RunOptions
from nwor_bench.run.sweep import close_sweep, failure_of, finish_sweep, worst_code
from nwor_bench.run.sweep_folder import DONE, FAILED, INTERRUPTED, SweepIndex
from nwor_bench.workload.options import declared
from nwor_bench.workload.sweep_file import EngineGroup


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


LOST_WORKERS = 3
"""Most workers that one engine's runs may lose before the sweep gives up on them."""


def require_ray() -> Any:
    """The `ray` package. Raises ConfigError where it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError.for_field(
            "--ray", True, "Ray is not installed: pip install 'nwor-bench[ray]'"
        ) from error


def check_flags_for_ray(given: Mapping[str, Any]) -> None:
    """Refuse flags that mean nothing on another machine, and --ray without Ray.

    `given` is what the command line says, by option name.
    """
    for each in declared(RunOptions):
        if each.option.is_local and each.name in given:
            raise ConfigError.for_field(
                each.flag, given[each.name], "the engines run elsewhere with --ray; leave it out"
            )
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
        self,
        ray: Any,
        index: SweepIndex,
        command: list[str],
        console: Console,
        options: RunOptions,
    ):
        self._ray, self._index, self._console = ray, index, console
        self._command, self._options = command, options
        self._waiting: list[EngineGroup] = []
        self._running: dict[Any, tuple[EngineGroup, Slot]] = {}
        self._lost: dict[int, int] = {}
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
        return worst_code(self._codes)

    def _start(self, group: EngineGroup, slot: Slot) -> None:
        """Start a task. `max_calls`: each process serves one engine, so no state is left behind."""
        name, command = self._index.content["name"], tuple(self._command)
        task = GroupTask(name, group, command, self._options.continue_on_error)
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
        except self._ray.exceptions.RayTaskError as error:
            del self._running[stream]
            self._fail_group(group, error.cause)
            return [slot]
        except self._ray.exceptions.RayError as error:
            del self._running[stream]
            self._again(group, error)
            alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
            return [slot] if slot.node is None or slot.node in alive else []
        self._heed(message, group)
        return []

    def _heed(self, message: Placed | RunFiles | Failed, group: EngineGroup) -> None:
        number = group.number
        if isinstance(message, Placed):
            self._say(f"engine {number} on {message.host}, {message.device}")
            return
        point = next(p for p in group.points if p.number == message.number)
        self._write(self._index.folder / point.folder, message.files)
        code = ExitCode(message.exit_code)
        if isinstance(message, Failed):
            self._index.set_run(
                message.number, status=FAILED, error=message.error, exit_code=message.exit_code
            )
            self._say(f"run {message.number} failed: {message.error}")
            if not self._options.continue_on_error:
                raise EngineError.at(f"run {message.number} ({point.label})", message.error)
        else:
            status = INTERRUPTED if code is ExitCode.INTERRUPTED else DONE
            self._index.set_run(message.number, status=status, error=None, exit_code=int(code))
            self._say(f"run {message.number} of {self._total}: {point.label}: {status}")
        self._codes.append(code)

    def _fail_group(self, group: EngineGroup, error: BaseException) -> None:
        """Mark the unfinished runs as failed: the engine could not be placed or started."""
        code, text = failure_of(error)
        for point in self._left(group):
            self._index.set_run(point.number, status=FAILED, error=text, exit_code=int(code))
            self._codes.append(code)
        self._say(f"engine {group.number} failed: {error}")
        if not self._options.continue_on_error:
            raise error

    def _again(self, group: EngineGroup, error: BaseException) -> None:
        """Restart the runs that a lost worker or node had not sent back."""
        lost = self._lost[group.number] = self._lost.get(group.number, 0) + 1
        left = self._left(group)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if lost >= LOST_WORKERS:
            given_up = EngineError.at(
                f"{lost} workers", f"were lost; the last: {reason}", joint=" "
            )
            self._fail_group(group, given_up)
        elif left:
            self._say(
                f"engine {group.number}: worker lost ({reason}); {len(left)} runs start again"
            )
            self._waiting.insert(0, replace(group, points=tuple(left)))

    def _left(self, group: EngineGroup) -> list[Any]:
        return [p for p in group.points if self._index.status(p.number) not in (DONE, FAILED)]

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

    @property
    def _total(self) -> int:
        return len(self._index.content["runs"])

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
