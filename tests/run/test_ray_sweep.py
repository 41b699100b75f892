"""Sweeps over a Ray cluster: placement, lost workers, one folder. A stand-in for Ray, and Ray."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused
from rich.console import Console

from nwor_bench.errors import ConfigError, EngineError, ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.report.document import Document
from nwor_bench.run.ray_sweep import (
    GroupTask,
    RunFiles,
    Slot,
    check_flags_for_ray,
    find_slots,
    run_on_ray,
)
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import resume_sweep, run_loaded
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.workload.sweep_file import (
    EngineGroup,
    SweepFile,
    group_by_engine,
    load_sweep,
    make_points,
)

SWEEP = {
    "name": "small",
    "axes": {
        "pairs": ["tiny-ngram", "tiny"], "requests": [1, 2], "nwor_modes": ["off", "stage"],
        "scv_modes": ["off"],
    },
    "settings": {"batches": 3, "max_new_tokens": 6, "max_warmup": 1},
}  # fmt: skip


def node(
    host: str, cpus: float, gpus: int = 0, alive: bool = True, name: str = ""
) -> dict[str, Any]:
    resources = {"CPU": cpus} | ({"GPU": float(gpus)} if gpus else {})
    return {
        "NodeID": name or host, "NodeManagerHostname": host, "Alive": alive, "Resources": resources
    }  # fmt: skip


def affinity(node_id: str, soft: bool) -> tuple[str, bool]:
    return (node_id, soft)


def test_each_engine_gets_whole_gpus() -> None:
    nodes = [node("a", 8, 4), node("b", 8, 3), node("c", 8), node("d", 8, 8, alive=False)]
    slots = find_slots(nodes, 1, affinity)
    assert slots == [Slot({"num_gpus": 1, "num_cpus": 1})] * 7
    assert len(find_slots(nodes, 2, affinity)) == 2 + 1
    with refused("tensor_parallel_size", value=5, naming="4 GPUs"):
        find_slots(nodes, 5, affinity)


def test_without_gpus_each_engine_gets_a_whole_machine() -> None:
    slots = find_slots([node("a", 8), node("b", 2)], 1, affinity)
    assert [(slot.node, slot.options["num_cpus"]) for slot in slots] == [("a", 8), ("b", 2)]
    assert [slot.options["scheduling_strategy"] for slot in slots] == [("a", False), ("b", False)]
    with refused("--ray", naming="2 Ray nodes run on a,"):
        find_slots([node("a", 4, name="x"), node("a", 4, name="y")], 1, affinity)


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException):
        super().__init__(str(cause))
        self.cause = cause


Script = Callable[[GroupTask], Iterator[Any]]


class FakeRay:
    """Runs `script(task)` a message at a time, in turn.

    An exception that a script yields is raised where its message is fetched.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, script: Script, nodes: list[dict[str, Any]]):
        self.script, self.cluster = script, nodes
        self.starts: list[int] = []
        self.most = self.cancelled = self.turn = 0
        self.running: set[Any] = set()

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self.cluster

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        assert options["max_calls"] == 1
        return lambda function: SimpleNamespace(remote=self.start)

    def start(self, task: GroupTask) -> Iterator[Any]:
        stream = self.script(task)
        self.starts.append(task.group.number)
        self.running.add(stream)
        self.most = max(self.most, len(self.running))
        return self.watched(stream)

    def watched(self, stream: Iterator[Any]) -> Iterator[Any]:
        try:
            for message in stream:
                yield message
                if isinstance(message, BaseException):
                    return
        finally:
            self.running.discard(stream)

    def wait(self, streams: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        self.turn += 1
        return [streams[self.turn % len(streams)]], []

    def get(self, message: Any) -> Any:
        if isinstance(message, BaseException):
            raise message
        return message

    def cancel(self, stream: Any, force: bool) -> None:
        self.cancelled += 1


@pytest.fixture
def groups() -> tuple[EngineGroup, ...]:
    return group_by_engine(make_points(SweepFile.model_validate_json(json.dumps(SWEEP))))


@pytest.fixture
def on_fake_ray(
    tmp_path: Path, groups: tuple[EngineGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[FakeRay, ExitCode, SweepIndex]]:
    strategies = SimpleNamespace(NodeAffinitySchedulingStrategy=affinity)
    sweep = SweepFile.model_validate_json(json.dumps(SWEEP))

    def run(script: Script, nodes: list[dict[str, Any]], **how: Any) -> Any:
        ray = FakeRay(script, nodes)
        monkeypatch.setattr("nwor_bench.run.ray_sweep.require_ray", lambda: ray)
        monkeypatch.setattr("nwor_bench.run.ray_sweep.import_module", lambda name: strategies)
        monkeypatch.setattr("nwor_bench.run.sweep_summary.swept_runs", lambda index: ())
        monkeypatch.setattr(
            "nwor_bench.run.sweep_summary.write_summary", lambda *_: Document("", ())
        )
        index = SweepIndex.create(tmp_path / "out", sweep, groups, "now")
        code = run_on_ray(index, groups, ["nwor-bench"], Console(quiet=True), RunOptions(**how))
        return ray, code, SweepIndex.open(tmp_path / "out")

    return run


def measured(task: GroupTask) -> Iterator[Any]:
    yield "a"
    for point in task.group.points:
        yield RunFiles(point.number, 0, {"run.json": b"{}"})


def statuses(index: SweepIndex) -> list[str]:
    return [run["status"] for run in index.content["runs"]]


GPUS = [node("a", 8, 2)]


def test_engines_run_at_once_and_end_in_one_folder(on_fake_ray: Any) -> None:
    ray, code, index = on_fake_ray(measured, GPUS)
    assert (ray.most, sorted(ray.starts), code) == (2, [1, 2], ExitCode.OK)
    assert statuses(index) == ["done"] * 4
    assert all(
        (index.folder / run["folder"] / "run.json").is_file() for run in index.content["runs"]
    )
    assert index.content["finished_at"]
    ray, _, _ = on_fake_ray(measured, [node("a", 8)])
    assert ray.most == 1


def test_the_unfinished_runs_of_a_lost_worker_have_failed(on_fake_ray: Any) -> None:
    def lossy(task: GroupTask) -> Iterator[Any]:
        for count, message in enumerate(measured(task)):
            if task.group.number == 1 and count == 2:
                yield RayError("The worker died")
            yield message

    with refused("the worker was lost", EngineError, naming="The worker died"):
        on_fake_ray(lossy, GPUS)
    _, code, index = on_fake_ray(lossy, GPUS, continue_on_error=True)
    assert code is ExitCode.FAILED
    assert statuses(index) == ["done", "failed", "done", "done"]


def test_the_last_machine_going_away_ends_the_sweep(on_fake_ray: Any) -> None:
    machine = node("a", 8)

    def taken_away(task: GroupTask) -> Iterator[Any]:
        machine["Alive"] = False
        yield RayError("The node died")

    with refused("Ray", EngineError):
        on_fake_ray(taken_away, [machine], continue_on_error=True)


def test_a_failed_run_ends_the_sweep_unless_it_may_go_on(on_fake_ray: Any) -> None:
    def failing(task: GroupTask) -> Iterator[Any]:
        for message in measured(task):
            is_bad = isinstance(message, RunFiles) and message.number == 1
            yield RunFiles(1, 3, message.files, "parity broke") if is_bad else message

    run = "run 1 (tiny-ngram short, 4 drafts, 1 request, temperature 0)"
    with refused(run, EngineError, naming="parity broke"):
        on_fake_ray(failing, [node("a", 8)])
    _, code, index = on_fake_ray(failing, GPUS, continue_on_error=True)
    assert code is ExitCode.CORRECTNESS_BROKEN
    assert statuses(index) == ["failed"] + ["done"] * 3
    assert index.content["runs"][0]["error"] == "parity broke"


def test_what_a_worker_refuses_is_raised_as_it_is(on_fake_ray: Any) -> None:
    def refusing(task: GroupTask) -> Iterator[Any]:
        yield RayTaskError(ConfigError.at("memory", "too little", 5))

    with refused("memory", value=5):
        on_fake_ray(refusing, GPUS)


def test_flags_about_this_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("--verbose", value=True, naming="--ray"):
        check_flags_for_ray({"file": "quick", "verbose": True})

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("nwor_bench.run.ray_sweep.import_module", missing)
    with refused("--ray", cause=ImportError, naming="pip install 'nwor-bench[ray]'"):
        check_flags_for_ray({"file": "quick"})


@pytest.mark.long
@pytest.mark.engine
def test_a_sweep_on_a_local_ray_goes_on_after_a_killed_worker(
    own_surroundings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    import psutil

    checkout = Path(__file__).resolve().parents[2]  # workers find what is not installed
    monkeypatch.setenv("PYTHONPATH", f"{checkout}:{checkout / 'kernels'}")
    killed: list[int] = []

    class Killing(Console):
        """Kills the worker of the first engine as soon as it is known where that runs."""

        def print(self, *objects: Any, **how: Any) -> None:
            if not killed and str(objects[0]).startswith("engine 1 on"):
                for process in psutil.Process().children(recursive=True):
                    if "ray::measure_group" in " ".join(process.cmdline()):
                        killed.append(process.pid)
                        process.kill()
            super().print(*objects, **how)

    monkeypatch.setattr("nwor_bench.run.progress.Console", Killing)
    content = Path("small.toml")
    content.write_text(
        'name = "small"\n[axes]\npairs = ["tiny-ngram", "tiny"]\nrequests = [2]\n'
        'nwor_modes = ["off", "stage"]\nscv_modes = ["off"]\n'
        "[settings]\nbatches = 3\nmax_new_tokens = 6\nmax_warmup = 1\n"
    )
    options = RunOptions(output=Path("out"), ray=True, continue_on_error=True)
    assert run_loaded(load_sweep(content), options) is ExitCode.FAILED
    assert len(killed) == 1
    assert sorted(statuses(SweepIndex.open(Path("out")))) == ["done", "failed"]
    assert resume_sweep(Path("out"), options=RunOptions(ray=True)) is ExitCode.OK
    assert not ray.is_initialized()
    index = json.loads(Path("out/sweep.json").read_text())
    assert [run["status"] for run in index["runs"]] == ["done", "done"]
    for run in index["runs"]:
        stored = read_run(Path("out") / run["folder"])
        assert stored.header.parity.broken == {}
        assert sum(batch.draft_tokens for batch in stored.batches) > 0
    starts = {
        read_run(Path("out") / run["folder"]).header.engine.start_count for run in index["runs"]
    }
    assert starts == {1}  # a process of its own for each engine
