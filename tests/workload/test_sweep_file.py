"""Sweep files: faults named by line, the fewest engines, every run in its folder."""

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
from fake_engine import FakeEngine, accept_arguments, events_but_gates
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.engine.memory import GIB, RUNTIME_BYTES
from nwor_bench.errors import ConfigError, EngineError, ExitCode, StoreError
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.store import read_run
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.run import execute
from nwor_bench.run.prepare import prepare
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import resume_sweep, run_loaded
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.run_spec import CacheDtype
from nwor_bench.workload.sweep_file import (
    Axes,
    Settings,
    SweepFile,
    group_by_engine,
    load_sweep,
    make_points,
)
from nwor_bench.workload.toml_file import resource_dir

pytestmark = pytest.mark.slow  # whole runs


SMALL = """
name = "small"
[axes]
pairs = ["tiny", "tiny-ngram"]
requests = [1, 2]
nwor_modes = ["off", "stage"]
scv_modes = ["off"]
[settings]
batches = 3
max_new_tokens = 6
max_warmup = 1
"""


@pytest.fixture
def small(tmp_path: Path, own_surroundings: None) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


NO_LUCK = EngineError.at("engine", "no luck")


class Engines:
    """Gives a new stand-in for every start, and remembers what each was started with."""

    def __init__(self, failing: dict[int, BaseException] | None = None) -> None:
        self.failing = failing or {}
        self.started: list[FakeEngine] = []
        self.specs: list[RunSpec] = []

    def __call__(self, pair: ResolvedPair, spec: RunSpec, log: Path | None) -> FakeEngine:
        assert not self.started or self.started[-1].closed == 1, "two engines at once"
        self.specs.append(spec)
        fault = self.failing.pop(len(self.started), None)
        self.started.append(FakeEngine(failing={} if fault is None else {6: fault}))
        return self.started[-1]


def sweep(path: Path, engines: Engines, **flags: Any) -> ExitCode:
    return run_loaded(
        load_sweep(path),
        RunOptions(output=Path("out"), **flags),
        engine_factory=engines,
        check_engine=accept_arguments,
    )


@functools.cache
def files_of_a_sweep(cut: bool) -> dict[Path, bytes]:
    """What the small sweep leaves, whole or interrupted in its third run."""
    sweep(Path("small.toml"), Engines({1: KeyboardInterrupt()} if cut else None))
    return {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


def leave_a_sweep(*, cut: bool) -> None:
    """Leave a sweep's folder, as it was measured once for all tests."""
    for path, content in files_of_a_sweep(cut).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def index() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("out/sweep.json").read_text())
    return content


def test_cache_dtypes_are_vllms() -> None:
    from vllm.config.cache import CacheDType

    assert get_args(CacheDtype) == get_args(CacheDType)


@pytest.mark.parametrize("name", [path.stem for path in resource_dir("sweeps").glob("*.toml")])
def test_the_shipped_sweeps_are_sound(name: str) -> None:
    shipped = load_sweep(Path(name))
    assert shipped.name == name
    assert make_points(shipped)
    assert load_sweep(Path(f"sweeps/{name}.toml")) == shipped


@pytest.mark.parametrize("pair", ["qwen2.5-7b-shape", "mine/v1.5.toml"])
def test_a_pairs_name_is_whole_in_labels_and_folders(pair: str) -> None:
    (point,) = make_points(SweepFile(axes=Axes(pairs=(pair,))))
    whole = pair.removeprefix("mine/").removesuffix(".toml")
    assert point.label.startswith(f"{whole} short")
    assert point.folder.startswith(f"01-{whole}-short")


def axis(values: list[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(values), unique=True, max_size=3).map(tuple)


@given(
    pairs=axis(["tiny", "smollm2", "tiny-ngram"]).filter(bool),
    scenarios=axis(["short", "medium", "mixed"]).filter(bool),
    draft_tokens=axis([2, 4, 8]),
    requests=axis([1, 8, 32]),
    temperature=axis([0.0, 0.8]),
    dtype=axis(["float32", "bfloat16"]),
)
def test_every_combination_runs_once_and_engines_start_least(**axes: Any) -> None:
    points = make_points(SweepFile(axes=Axes(**axes)))
    count = 1
    for values in axes.values():
        count *= max(1, len(values))
    assert len({point.label for point in points}) == len(points) == count
    assert len({point.folder for point in points}) == count
    assert [point.number for point in points] == list(range(1, count + 1))
    groups = group_by_engine(points)
    assert sorted(p.number for g in groups for p in g.points) == list(range(1, count + 1))
    # One engine for every pair, dtype and number of drafts is the least that there can be.
    drafts = axes["draft_tokens"] or {p.spec.scenario.draft_tokens for p in points}
    assert len(groups) == len(axes["pairs"]) * max(1, len(axes["dtype"])) * len(drafts)
    for group in groups:
        assert {(p.pair, p.spec.dtype, p.spec.scenario.draft_tokens) for p in group.points} == {
            (group.points[0].pair, group.spec.dtype, group.spec.scenario.draft_tokens)
        }
        for point in group.points:  # every run fits into its engine
            assert point.spec.scenario.requests <= group.spec.scenario.requests
            assert point.spec.scenario.max_model_len <= group.spec.scenario.max_model_len


def test_a_sweep_leaves_a_run_folder_each_an_index_and_a_summary(small: Path) -> None:
    engines = Engines()
    assert sweep(small, engines) is ExitCode.OK
    assert [spec.scenario.requests for spec in engines.specs] == [2, 2]
    assert [engine.closed for engine in engines.started] == [1, 1]
    runs = index()["runs"]
    assert [(r["pair"], r["requests"], r["engine"]) for r in runs] == [
        ("tiny", 1, 1), ("tiny", 2, 1), ("tiny-ngram", 1, 2), ("tiny-ngram", 2, 2),
    ]  # fmt: skip
    assert {run["status"] for run in runs} == {"done"}
    for run in runs:
        data = read_run(Path("out") / run["folder"])
        assert data.header.status == "complete"
        assert data.header.scenario["requests"] == run["requests"]
        assert {batch.requests for batch in data.batches} == {run["requests"]}
        assert (Path("out") / run["folder"] / "report.html").is_file()
    summary = pd.read_csv("out/summary.csv")
    assert len(summary) == 4 * 3  # off x off, stage x off, the A/A arm
    assert set(summary.requests) == {1, 2}
    assert summary.tokens_per_s_ratio.notna().equals(summary.ratio_to_off.notna())
    assert "stage x off" in Path("out/summary.md").read_text()
    assert index()["finished_at"]


def test_a_run_that_cannot_be_prepared_is_named(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: RunSpec, *_: object) -> Any:
        if spec.scenario.requests == 2:
            raise ConfigError("refused")
        return prepare(spec, *_)

    monkeypatch.setattr("nwor_bench.run.sweep.prepare", refuse)
    with pytest.raises(ConfigError, match=r"^run 2 \(tiny short, 4 drafts, 2 requests.*: refused$"):
        sweep(small, Engines())


def test_a_dry_run_tells_cells_engines_time_and_memory_and_writes_nothing(
    small: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())

    def refuse(*_: object) -> Any:
        raise AssertionError("something was started")

    started = {"engine_factory": refuse, "check_engine": refuse}
    code = run_loaded(load_sweep(small), RunOptions(dry_run=True), **started)
    out = capsys.readouterr().out
    assert code is ExitCode.OK
    assert "sweep small: 4 runs, engine starts: 2" in out
    assert "\n  off x off\n  stage x off\n  off x off (A/A)\n" in out
    lines = out.splitlines()
    # One warm-up batch, the gate and three blocks of three cells each, and the gate's last batch.
    rows = re.findall(r" (\d): (\S+) short, 4 drafts, (\d) requests?, .*\((\d+) batches\)", out)
    pairs = ("tiny", "1"), ("tiny", "2"), ("tiny-ngram", "1"), ("tiny-ngram", "2")
    assert rows == [(str(n), *each, "14") for n, each in enumerate(pairs, start=1)]
    assert max(map(len, lines)) <= 80
    found = re.findall(r"memory: (\S+) MiB of KV cache, about (\S+) GiB in all, (\S+) GiB", out)
    assert len(found) == 2
    for cache, needed, free in found:
        assert 0 < float(cache) < 100
        assert RUNTIME_BYTES["host"] / GIB <= float(needed) < float(free)
    starts = [lines.index(line) for line in lines if line.startswith("engine ")]
    assert [lines[i].split(",")[0] for i in starts] == ["engine 1: tiny", "engine 2: tiny-ngram"]
    assert sorted(tmp_path.iterdir()) == before


def test_a_dry_run_refuses_what_the_run_would(small: Path) -> None:
    leave_a_sweep(cut=False)
    with refused("--output", value="out"):
        run_loaded(load_sweep(small), RunOptions(output=Path("out"), dry_run=True))
    run = Path("out") / index()["runs"][0]["folder"]
    with refused("--output", value=str(run)):
        run_loaded(load_sweep(small), RunOptions(output=run, dry_run=True))


def test_an_engine_without_room_is_named(small: Path) -> None:
    small.write_text(SMALL + "kv_cache_gib = 1e6\n")
    with refused("engine 1 (tiny): kv_cache_memory_bytes", value=str(10**6 * 2**30)):
        run_loaded(load_sweep(small), RunOptions(dry_run=True))


def test_a_failing_run_ends_the_sweep_and_the_index_says_so(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with refused("engine", EngineError):
        sweep(small, Engines({0: NO_LUCK}))
    runs = index()["runs"]
    assert [run["status"] for run in runs] == ["failed"] + ["pending"] * 3
    assert (runs[0]["error"], runs[0]["exit_code"]) == ("engine: no luck", 1)
    assert index()["finished_at"] is None
    summary = Path("out/summary.md").read_text()
    assert "**FAILED: engine: no luck**" in summary
    assert "| Run" not in summary  # no table without a number
    out = capsys.readouterr().out
    assert "FAILED" not in out  # the error is printed by whoever catches it
    assert out.endswith("To go on: nwor-bench sweep --resume out\n")


def test_a_failing_run_may_be_passed_over(small: Path) -> None:
    """The engine whose batch failed serves no further run."""
    engines = Engines({0: NO_LUCK})
    assert sweep(small, engines, continue_on_error=True) is ExitCode.FAILED
    assert [run["status"] for run in index()["runs"]] == ["failed"] + ["done"] * 3
    assert len(engines.started) == 3
    assert "no luck" in Path("out/summary.md").read_text() or Path("out/summary.csv").is_file()


def test_an_interrupted_sweep_goes_on(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(small, Engines({1: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    assert [run["status"] for run in index()["runs"]] == [
        "done", "done", "interrupted", "pending",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert out.endswith("Report: out/summary.html\nTo go on: nwor-bench sweep --resume out\n")
    assert out.count("To go on") == 1
    engines = Engines()
    code = resume_sweep(
        Path("out"), small, engine_factory=engines, check_engine=accept_arguments
    )  # fmt: skip
    assert code is ExitCode.OK
    assert len(engines.started) == 1
    assert {run["status"] for run in index()["runs"]} == {"done"}
    assert "To go on" not in capsys.readouterr().out
    third = read_run(Path("out") / index()["runs"][2]["folder"])
    told = [event["event"] for event in events_but_gates(third)]
    assert told == ["interrupted", "resumed", "superseded"]
    assert len(third.batches) == 2 + 1 + 3 * 4
    with refused("--resume", value="out"):
        resume_sweep(Path("out"), engine_factory=engines, check_engine=accept_arguments)


def test_ctrl_c_outside_of_measuring_is_an_interruption_too(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(execute, "write_files", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(small, Engines(), continue_on_error=True)
    runs = index()["runs"]
    assert [run["status"] for run in runs] == ["interrupted"] + ["pending"] * 3
    assert runs[0]["exit_code"] == ExitCode.INTERRUPTED


def test_a_single_run_is_no_sweep(small: Path) -> None:
    leave_a_sweep(cut=False)
    run = Path("out") / index()["runs"][0]["folder"]
    with refused("--file", value=str(small), naming=str(run)):
        resume_sweep(run, small)


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ("[]", "sweep.json: format_version"),
        ("{", "sweep.json"),
        ('{"format_version": 1}', "sweep.json: sweep"),
        ('{"format_version": 7}', "sweep.json: format_version"),
        ('{"format_version": 1, "sweep": {"axs": {}}}', "sweep.json: sweep.axs"),
        ("[" * 10**5, "sweep.json"),
    ],
)
def test_a_damaged_index_is_one_message(tmp_path: Path, damage: str, field: str) -> None:
    (tmp_path / "sweep.json").write_text(damage)
    with refused(field, StoreError):
        resume_sweep(tmp_path)


@pytest.mark.parametrize(
    ("change", "run"),
    [
        (lambda content: content.pop("runs"), 1),
        (lambda content: content.update(runs="x"), 1),
        (lambda content: content.update(runs=["x"]), 1),
        (lambda content: content["runs"].pop(), 4),
        (lambda content: content["runs"][1].update(requests=77), 2),
        (lambda content: content["runs"][0].update(exit_code=None), 1),
        (lambda content: content["runs"][3].update(status="finished"), 4),
        (lambda content: content.pop("name"), None),
    ],
)
def test_an_edited_index_is_refused_before_anything_starts(
    small: Path, change: Callable[[dict[str, Any]], object], run: int | None
) -> None:
    leave_a_sweep(cut=True)
    content = index()
    labels = [point.label for point in make_points(load_sweep(small))]
    field = f"runs: run {run} ({labels[run - 1]})" if run else "name"
    change(content)
    Path("out/sweep.json").write_text(json.dumps(content))
    engines = Engines()
    with refused(f"sweep.json: {field}", StoreError):
        resume_sweep(Path("out"), engine_factory=engines, check_engine=accept_arguments)
    assert engines.started == []


def test_a_sweep_goes_on_with_its_own_contents_only(small: Path) -> None:
    leave_a_sweep(cut=True)
    small.write_text(SMALL.replace("batches = 3", "batches = 4"))
    with refused("--file", value=str(small), naming="other contents"):
        resume_sweep(Path("out"), small, engine_factory=Engines(), check_engine=accept_arguments)


def broken_in(number: int) -> type[Engines]:
    """Engines of which the one started as that number has a stage cell with wrong tokens."""

    class Broken(Engines):
        def __call__(self, *arguments: Any) -> FakeEngine:
            engine = super().__call__(*arguments)
            if len(self.started) == number:
                engine.wrong = lambda call, cell: cell.label == "stage x off"
            return engine

    return Broken


def test_wrong_numbers_are_worse_than_none(small: Path) -> None:
    engines = broken_in(3)({0: NO_LUCK})
    assert sweep(small, engines, continue_on_error=True) is ExitCode.CORRECTNESS_BROKEN


def test_an_interruption_of_a_broken_run_ends_the_sweep_too(small: Path) -> None:
    """Exit code 3 is the run's; the next run must not start."""
    assert sweep(small, broken_in(1)({0: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    assert [run["status"] for run in index()["runs"]] == ["interrupted"] + ["pending"] * 3


def test_a_sweep_that_goes_on_still_ends_with_the_worst_of_all_its_runs(small: Path) -> None:
    """The first two runs broke before the cut, the rest are fine."""
    assert sweep(small, broken_in(1)({1: KeyboardInterrupt()})) is ExitCode.INTERRUPTED
    assert [run["exit_code"] for run in index()["runs"]] == [3, 3, 130, None]
    code = resume_sweep(Path("out"), engine_factory=Engines(), check_engine=accept_arguments)
    assert code is ExitCode.CORRECTNESS_BROKEN
    assert [run["exit_code"] for run in index()["runs"]] == [3, 3, 0, 0]


def test_a_run_that_ended_just_before_the_index_was_written_keeps_its_exit_code(
    small: Path,
) -> None:
    assert sweep(small, broken_in(1)()) is ExitCode.CORRECTNESS_BROKEN
    content = index()
    content["runs"][0] |= {"status": "pending", "exit_code": None}
    Path("out/sweep.json").write_text(json.dumps(content))
    engines = Engines()
    code = resume_sweep(Path("out"), engine_factory=engines, check_engine=accept_arguments)
    assert code is ExitCode.CORRECTNESS_BROKEN
    assert index()["runs"][0]["exit_code"] == ExitCode.CORRECTNESS_BROKEN
    assert engines.started == []


def test_a_folder_that_holds_a_sweep_is_refused(small: Path) -> None:
    leave_a_sweep(cut=False)
    with refused("--output", value="out") as caught:
        sweep(small, Engines())
    assert str(caught.value) == (
        "--output: 'out' is invalid; it already holds a sweep; name a new folder, or write "
        "nwor-bench sweep --resume out"
    )


def test_a_run_that_was_begun_with_another_configuration_does_not_go_on(small: Path) -> None:
    leave_a_sweep(cut=True)
    header = Path("out") / index()["runs"][2]["folder"] / "run.json"
    content = json.loads(header.read_text())
    content["spec"]["max_warmup"] = 9
    header.write_text(json.dumps(content))
    with refused("--resume: spec.max_warmup", value=1, naming="begun with 9"):
        resume_sweep(Path("out"), engine_factory=Engines(), check_engine=accept_arguments)


def test_an_engine_of_draft_counts_has_room_for_a_batch_of_each() -> None:
    """vLLM captures graphs for those counts only that a batch size names."""
    axes = Axes(
        requests=(1,), draft_tokens=(4,), nwor_modes=(NworMode.OFF,), scv_modes=(ScvMode.OFF,)
    )
    points = make_points(SweepFile(axes=axes, settings=Settings(draft_counts=(0, 2, 4))))
    (group,) = group_by_engine(points)
    assert (points[0].spec.scenario.requests, group.spec.scenario.requests) == (1, 3)


def test_modes_are_the_cells_of_every_run() -> None:
    axes = Axes(nwor_modes=(NworMode.OFF,), scv_modes=(ScvMode.OFF, ScvMode.GRAPH))
    (point,) = make_points(SweepFile(axes=axes))
    assert [cell.label for cell in point.spec.experiment.cells("p")] == [
        "off x off", "off x graph", "off x off (A/A)",
    ]  # fmt: skip
    assert replace(point, number=7).folder.startswith("07-smollm2-short")
