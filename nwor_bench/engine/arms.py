"""Engines of one run that differ in vLLM's arguments: each in a process of its own, all up at once.

They start together, most of a start being one thread's work, but for those that compile the same:
the A/A engine follows, and a second arm of the same method and drafter.

With `--against` the second one has its arguments; with `worth --engines` each draft count has an
engine, k = 0 one without a drafter; with `worth --arm` each method has one. The last has the
baseline's arguments again, for the A/A arm: two engines with equal arguments differ too, by where
their memory lies and what they captured. If memory is short, the A/A arm is the first engine again.
"""

import multiprocessing
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from nwor_bench.engine.arguments import on_cpu
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.memory import engines_with_room
from nwor_bench.engine.protocol import Engine
from nwor_bench.errors import BenchError, EngineError
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.cell import Arguments, Arm, Drafts, engine_name
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.types import Cell
from nwor_bench.workload.config import RunSpec

GPU_SHARE = 0.9
"""Share of a GPU's memory, split as gpu_memory_utilization: vLLM refuses to start with less than
that free, and sizes nothing by it, as kv_cache_memory_bytes is set."""

IDLE_S = 0.3
"""How long threads of Intel's OpenMP spin after their last work (200 ms), and a little more."""

CLOSING_S = 30.0
"""How long an engine may take to close before its process is ended."""


def start_engine(pair: ResolvedPair, spec: RunSpec, log: Path | None) -> Engine:
    """The run's engine, or several behind one. Raises as `VllmEngine` does."""
    if spec.experiment.asked_by is None:
        return VllmEngine(pair, spec, log)
    started = time.perf_counter()
    specs = engines_with_room(pair, spec)
    engines: dict[Arm | None, ChildEngine] = {}
    try:
        for group in _start_groups(pair, specs):
            for arm in group:
                engines[arm] = _launch(pair, specs, arm, log)
            for arm in group:
                engines[arm].wait_started()
    except BaseException:
        for engine in engines.values():
            engine.close()
        raise
    seconds = time.perf_counter() - started
    return cast(Engine, EngineArms(cast(dict[Arm | None, Engine], engines), seconds))


def _start_groups(
    pair: ResolvedPair, specs: Mapping[Arm | None, RunSpec]
) -> list[list[Arm | None]]:
    """Arms whose engines start together: two that compile the same would write the same files."""
    groups: list[dict[object, Arm | None]] = []
    for arm, spec in specs.items():
        own = pair.of_arm(arm)
        compiled = own.method, own.draft, spec.scenario.draft_tokens, repr(spec.engine_args)
        group = next((group for group in groups if compiled not in group), None)
        if group is None:
            groups.append(group := {})
        group[compiled] = arm
    return [list(group.values()) for group in groups]


def _launch(
    pair: ResolvedPair, specs: Mapping[Arm | None, RunSpec], arm: Arm | None, log: Path | None
) -> "ChildEngine":
    """The arm's engine, with an equal share of a GPU and a log of its own."""
    pair = pair.of_arm(arm)
    spec, number = specs[arm], list(specs).index(arm)
    if not on_cpu() and "gpu_memory_utilization" not in spec.engine_args:
        share = {"gpu_memory_utilization": round(GPU_SHARE / len(specs), 3)}
        spec = replace(spec, engine_args={**spec.engine_args, **share})
    path = log and log.with_stem(f"{log.stem}-{number}" if number else log.stem)
    return ChildEngine(pair, spec, path)


class EngineArms:
    """Several engines as one `Engine`: a cell's arm says which of them runs.

    Args:
        engines: by arm, None being the baseline's; an arm without one runs on the baseline's.
        start_seconds: until all had started.
        idle_s: pause before another engine runs.
    """

    def __init__(
        self,
        engines: Mapping[Arm | None, Engine],
        start_seconds: float,
        idle_s: float | None = None,
    ):
        self._engines = engines
        self._active = engines[None]
        statuses = {arm: engine.status() for arm, engine in engines.items()}
        baseline = statuses.pop(None)
        facts = {str(arm): _differences(status, baseline) for arm, status in statuses.items()}
        methods = [status.rejection_sample_method for status in (baseline, *statuses.values())]
        self._facts = {
            "arms": facts,
            "rejection_sample_method": next(filter(None, methods), None),  # none without drafts
            "start_count": len(engines),
            "start_seconds": round(start_seconds, 2),
        }
        is_cpu = str(baseline.device).startswith("cpu")
        self._idle_s = (IDLE_S if is_cpu else 0.0) if idle_s is None else idle_s

    def status(self) -> EngineStatus:
        """The baseline's, and in what the others' differ."""
        return self._engines[None].status().model_copy(update=self._facts)

    def set_modes(self, cell: Cell) -> None:
        """Let the cell's engine run from now on."""
        method = self._engines.get(Arguments(engine_name(cell.arm)), self._engines[None])
        engine = self._engines.get(cell.arm, method)
        if engine is not self._active:
            time.sleep(self._idle_s)
        self._active = engine
        engine.set_modes(replace(cell, arm=Drafts(cell.fixed_drafts) if cell.drafts else None))

    def check_layers(self, requests: int | None) -> Any:
        """Check layers of the active engine; None: every engine stops."""
        if requests is not None:
            return self._active.check_layers(requests)
        for engine in self._engines.values():
            engine.check_layers(None)
        return []

    def __getattr__(self, name: str) -> Any:
        """Everything else is the active engine's."""
        return getattr(self._active, name)

    def close(self) -> None:
        """Close every engine."""
        for engine in self._engines.values():
            engine.close()


def _differences(status: EngineStatus, baseline: EngineStatus) -> dict[str, Any]:
    """Facts of an engine that are not the baseline's, and how long its start took."""
    other = baseline.model_dump(mode="json")
    facts = status.model_dump(mode="json")
    return {name: value for name, value in facts.items() if value != other[name]}


class ChildEngine:
    """A `VllmEngine` in a process of its own; its methods are called there.

    Times are taken in that process, so passing answers on costs no measured time. Call
    `wait_started` before anything else.
    """

    def __init__(self, pair: ResolvedPair, spec: RunSpec, log: Path | None):
        context = multiprocessing.get_context("spawn")  # a fork would share CUDA and OpenMP
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pair, spec, log))
        self._process.start()
        theirs.close()
        self._busy = True

    def wait_started(self) -> None:
        """Raises what the engine's start raised there, or EngineError if its process ended."""
        self._answer()

    def kv_cache(self) -> Any:
        """The engine's KV cache, whose methods are called there too."""
        return _Remote(self, "_kv_cache")

    def __getattr__(self, name: str) -> "_Remote":
        return _Remote(self, name)

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method of the engine in its process; raises what it raises."""
        try:
            self._pipe.send((name, args, named))
        except OSError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> Any:
        self._busy = True
        try:
            answer, error = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        self._busy = False
        if error is not None:
            raise error
        return answer

    def _ended(self) -> EngineError:
        self._process.join()
        code = self._process.exitcode
        problem = f"its process ended with code {code}; its log says more"
        return EngineError.at("one of the run's engines", problem, code)

    def close(self) -> None:
        """Close the engine and end its process; at once if a call has not come back."""
        if self._process.is_alive() and not self._busy:
            self._pipe.send(None)
            self._process.join(CLOSING_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


class _Remote:
    """A part of the engine, whose methods, and those of its parts, are called in its process."""

    def __init__(self, engine: ChildEngine, name: str):
        self._engine, self._name = engine, name

    def __getattr__(self, name: str) -> "_Remote":
        return _Remote(self._engine, f"{self._name}.{name}")

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._engine.call(self._name, *args, **named)


def _serve(pipe: Connection, pair: ResolvedPair, spec: RunSpec, log: Path | None) -> None:
    """Start an engine and call its methods until told to stop, or until nobody is left to tell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the other side heeds it
    engine: VllmEngine | None = None
    try:
        engine = VllmEngine(pair, spec, log)
        pipe.send((None, None))
        while (asked := pipe.recv()) is not None:
            name, args, named = asked
            try:
                answer = attrgetter(name)(engine)(*args, **named)
            except Exception as error:
                pipe.send((None, _picklable(error)))
            else:
                pipe.send((answer, None))
    except EOFError:
        pass
    except Exception as error:
        pipe.send((None, _picklable(error)))
    finally:
        if engine is not None:
            engine.close()


def _picklable(error: Exception) -> BenchError:
    """Errors of other kinds may not be rebuilt in another process."""
    return (
        error if isinstance(error, BenchError) else EngineError(f"{type(error).__name__}: {error}")
    )
