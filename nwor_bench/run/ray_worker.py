"""A Ray worker: lock its device, measure the runs of one engine, send each back."""

import fcntl
import io
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from rich.console import Console

from nwor_bench.engine.engine import VllmEngine, check_arguments
from nwor_bench.engine.memory import require_memory
from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs import cache_root
from nwor_bench.run.execute import GroupEngine, Prepared, run_prepared
from nwor_bench.run.prepare import prepare_point
from nwor_bench.run.sweep import failure_of
from nwor_bench.workload.sweep_file import EngineGroup, Point


@dataclass(frozen=True)
class GroupTask:
    """Runs of one engine. `command` is the command line, for the records."""

    sweep: str
    group: EngineGroup
    command: tuple[str, ...]
    continue_on_error: bool


@dataclass(frozen=True)
class Placed:
    """Host and device of the engine."""

    host: str
    device: str


@dataclass(frozen=True)
class RunFiles:
    """A run that ended, with all files of its folder."""

    number: int
    exit_code: int
    files: dict[str, bytes]


@dataclass(frozen=True)
class Failed(RunFiles):
    """A run that failed, with the files written so far."""

    error: str


def measure_group(task: GroupTask) -> Iterator[Placed | RunFiles]:
    """Measure every run of the task on one engine; gives where it runs, then each run.

    Raises ConfigError, before the engine starts, if another engine is timed on this device.
    """
    sys.argv = list(task.command)
    with ExitStack() as stack:
        device = stack.enter_context(device_held_alone())
        yield Placed(socket.gethostname(), device)
        work = Path(stack.enter_context(TemporaryDirectory(prefix="nwor-bench-ray-")))
        prepared = _prepare(task)
        engine = stack.enter_context(closing(GroupEngine(VllmEngine, task.group.spec)))
        for point in task.group.points:
            result = _measure(prepared[point.number], point, engine, work / point.folder)
            yield result
            if isinstance(result, Failed) and not task.continue_on_error:
                return


def _prepare(task: GroupTask) -> dict[int, Prepared]:
    """Check models, memory and vLLM on this machine, as the sweep's own machine could not."""
    quiet = Console(file=io.StringIO())
    points = task.group.points
    prepared = {p.number: prepare_point(p, quiet) for p in points}
    pair = prepared[points[0].number].pair
    require_memory(pair, task.group.spec)
    check_arguments(pair, task.group.spec)
    return prepared


def _measure(prepared: Prepared, point: Point, engine: GroupEngine, folder: Path) -> RunFiles:
    quiet = Console(file=io.StringIO())
    try:
        code = run_prepared(prepared, folder, engine.source(prepared), quiet, in_sweep=True)
    except Exception as error:
        engine.close()
        code, text = failure_of(error)
        return Failed(point.number, int(code), _files(folder), text)
    return RunFiles(point.number, int(code), _files(folder))


def _files(folder: Path) -> dict[str, bytes]:
    found = folder.iterdir() if folder.is_dir() else ()
    return {path.name: path.read_bytes() for path in found if path.is_file()}


@contextmanager
def device_held_alone(lock_folder: Path | None = None) -> Iterator[str]:
    """Lock this process's GPUs, or the machine if it has none; yields their names.

    The operating system's file locks work across this user's clusters and sweeps and end with the
    process. Raises ConfigError if a device is locked, or no lock can be made.

    Args:
        lock_folder: created if missing, for this user only; None: `locks` in the cache.
    """
    devices = visible_devices()
    folder = lock_folder or cache_root() / "locks"
    host = socket.gethostname()  # a home may be shared by machines
    with ExitStack() as stack:
        for device in devices:
            path = folder / f"{host}-{device}.lock"
            file = stack.enter_context(_lock_file(path))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError.for_field(
                    "--ray", True,
                    f"another engine is being timed on {device} of {host}; let Ray have each GPU "
                    "once, and one node on each machine",
                ) from error  # fmt: skip
            except OSError as error:
                raise _no_lock(path, error) from error
        yield ", ".join(devices)


def _lock_file(path: Path) -> IO[str]:
    """Open a lock's file in a folder of the user's own: one in /tmp may be another user's."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _no_lock(path.parent, error) from error
    try:
        return path.open("a")
    except OSError as error:
        raise _no_lock(path, error) from error


def _no_lock(path: Path, error: OSError) -> ConfigError:
    return ConfigError.for_field(
        "NWOR_BENCH_CACHE", str(path),
        f"the lock that keeps engines apart cannot be made there ({error.strerror}); set "
        f"NWOR_BENCH_CACHE on {socket.gethostname()} to a folder that you can write and lock",
    )  # fmt: skip


def visible_devices() -> list[str]:
    """UUIDs of the GPUs that Ray gave this process; "cpu" where it gave none."""
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return ["cpu"]
    from nwor_bench.instruments.device import visible_gpu_uuids

    return visible_gpu_uuids() or ["cpu"]
