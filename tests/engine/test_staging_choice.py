"""How a GPU is to hold drafts' K/V: from flag or file to the worker, and refused on a CPU."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine, accept_arguments
from refusals import refused
from synthetic_run import header_of, make_run, with_header

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.analysis.comparing.preconditions import blocking_differences, other_differences
from nwor_bench.analysis.dram.prediction import strategy_of
from nwor_bench.analysis.findings import FindingKind, Severity, findings
from nwor_bench.engine import arguments as engine_config
from nwor_bench.errors import ExitCode
from nwor_bench.models.strategies import BY_REFERENCE, COPY_IN_L2, COPY_SPILLED
from nwor_bench.records.store import read_run
from nwor_bench.records.types import StageBy, StageL2
from nwor_bench.run import resume
from nwor_bench.run.prepare import PairChoice, resume_one, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep_prepare import check_flags, run_sweep
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.sweep_file import Settings, SweepFile, load_sweep
from nwor_bench.workload.sweep_points import make_points

COPY = {"stage_by": "copy"}
PERSIST = {"stage_by": "copy", "stage_l2": "persist"}
KEPT = {"buffer_bytes": 4_000_000, "window_bytes": 4_000_000, "set_aside_bytes": 4_194_304,
        "hit_ratio": 1.0, "unavailable": None}  # fmt: skip
IN_PART = {**KEPT, "buffer_bytes": 60_000_000, "window_bytes": 50_000_000,
           "set_aside_bytes": 30_000_000, "hit_ratio": 0.6}  # fmt: skip
REFUSED = {**dict.fromkeys(KEPT), "unavailable": "this GPU sets no L2 aside"}

pytestmark = pytest.mark.usefixtures("own_surroundings")


def spec(**changes: Any) -> RunSpec:
    return resolve(load_scenario("short"), requests=2, batches=3, **changes)


def test_drafts_are_held_by_reference_unless_asked_otherwise() -> None:
    usual = spec()
    assert (usual.stage_by, usual.stage_l2) == (StageBy.REFERENCE, StageL2.NORMAL)
    asked = spec(**PERSIST)
    assert (asked.stage_by, asked.stage_l2) == (StageBy.COPY, StageL2.PERSIST)
    plain = json.loads(json.dumps(asked.to_dict()))
    assert (plain["stage_by"], plain["stage_l2"]) == ("copy", "persist")
    assert resume.stored_spec(header_of({"spec": plain})) == asked


@pytest.mark.parametrize(
    ("flags", "field", "wanted"),
    [
        ({"stage_by": "copi"}, "--stage-by", {"value": "copi", "near": "copy"}),
        ({"stage_by": "copy", "stage_l2": "on"}, "--stage-l2", {"value": "on", "near": ""}),
        ({"stage_l2": "persist"}, "--stage-l2", {"value": "persist", "naming": "--stage-by copy"}),
        (
            {"stage_by": "copy", "nwor_modes": "off"},
            "--stage-by",
            {"value": "copy", "naming": "--nwor-modes off,stage"},
        ),
    ],
)
def test_words_that_do_not_go_together(
    flags: dict[str, str], field: str, wanted: dict[str, Any]
) -> None:
    with refused(field, **wanted) as refusal:
        spec(**flags)
    assert refusal.value.exit_code is ExitCode.BAD_USAGE


@pytest.mark.parametrize("asked", [COPY, PERSIST])
def test_without_a_gpu_there_is_one_message_and_nothing_starts(
    asked: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_config, "on_cpu", lambda: True)
    with refused("--stage-by", value="copy", naming="CUDA") as refusal:
        run_one(spec(**asked), PairChoice(pair="tiny"), RunOptions(output=tmp_path / "run"))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_flags_reach_the_specification(command_line: Any) -> None:
    arguments = ["sweep", "--pair", "tiny", "--stage-by", "copy", "--stage-l2", "persist"]
    code, said, _ = command_line(*arguments, "--dry-run")
    assert code == ExitCode.OK
    assert "mode stage: by copy, kept in L2" in said.splitlines()
    code, said, _ = command_line("sweep", "--pair", "tiny", "--dry-run")
    assert "mode stage" not in said
    code, _, refusal = command_line("sweep", "--pair", "tiny", "--stage-l2", "persist")
    assert code == ExitCode.BAD_USAGE
    assert "--stage-l2" in refusal


def test_the_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "on_cpu", lambda: False)
    for changes, told in (({}, ("reference", "normal")), (PERSIST, ("copy", "persist"))):
        monkeypatch.setattr(os, "environ", {})
        asked = spec(**changes)
        engine_config.set_environment("bfloat16", 1, asked.worker_variables)
        names = ("VLLM_NWOR_STAGE_BY", "VLLM_NWOR_STAGE_L2")
        assert tuple(os.environ[name] for name in names) == told


def test_l2_is_asked_for_through_nvidias_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "_has_gpu", lambda: True)
    engine_config._check_staging(spec(**COPY))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with refused("--stage-l2", value="persist", cause=ImportError, naming="cuda-bindings"):
        engine_config._check_staging(spec(**PERSIST))
    for name in ("cuda", "cuda.bindings", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(bindings=None, runtime=None))
    engine_config._check_staging(spec(**PERSIST))


@pytest.mark.slow  # several runs
def test_a_run_goes_on_as_it_was_begun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    how: dict[str, Any] = {"check_engine": accept_arguments}
    stopped = FakeEngine(failing={9: KeyboardInterrupt()})
    begun = spec(**COPY, max_warmup=1)
    run_one(
        begun,
        PairChoice(pair="tiny"),
        RunOptions(output=folder),
        engine_factory=lambda *_: stopped,
        **how,
    )
    header = read_run(folder).header
    assert header.spec["stage_by"] == "copy"
    with refused("--stage-l2", value="persist", naming="'normal'"):
        resume.check_flags({"stage_l2": "persist"}, header)
    with refused("--stage-by", value="reference", naming="'copy'"):
        resume.check_flags({"stage_by": "reference"}, header)
    given = {"stage_by": "copy", "resume": "run"}
    code = resume_one(folder, given, engine_factory=lambda *_: FakeEngine(), **how)
    assert code is ExitCode.OK


def test_a_run_begun_before_there_was_a_choice_is_by_reference() -> None:
    plain = spec().to_dict()
    del plain["stage_by"], plain["stage_l2"]
    assert resume.stored_spec(header_of({"spec": plain})) == spec()


@pytest.mark.slow
def test_a_sweep_file_names_them_under_settings(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "it.toml"
    path.write_text('[axes]\npairs = ["tiny"]\n[settings]\nstage_by = "copy"\nstage_l2 = "persist"')
    (point,) = make_points(load_sweep(path))
    assert (point.spec.stage_by, point.spec.stage_l2) == (StageBy.COPY, StageL2.PERSIST)
    assert run_sweep(path, RunOptions(dry_run=True)) is ExitCode.OK
    assert "mode stage: by copy, kept in L2" in capsys.readouterr().out.splitlines()
    path.write_text('[settings]\nstage_by = "copies"')
    with refused("it.toml:2: settings.stage_by", value="copies"):
        load_sweep(path)
    with refused("--stage-by", value="copy", naming="`stage_by` under [settings]"):
        check_flags({"stage_by": "copy"})
    with refused("run 1 (smollm2, short): --stage-l2", value="persist"):
        make_points(SweepFile(settings=Settings(stage_l2=StageL2.PERSIST)))


@pytest.mark.parametrize(
    ("asked", "l2", "strategy"),
    [
        ({}, None, BY_REFERENCE),
        ({"stage_by": "reference"}, None, BY_REFERENCE),
        (COPY, None, COPY_SPILLED),
        (PERSIST, KEPT, COPY_IN_L2),
        (PERSIST, IN_PART, COPY_SPILLED),
        (PERSIST, REFUSED, COPY_SPILLED),
        (PERSIST, {**KEPT, "unavailable": "cudaDeviceSetLimit: x"}, COPY_SPILLED),
    ],
)
def test_the_prediction_is_that_of_what_was_done(asked: Any, l2: Any, strategy: Any) -> None:
    assert strategy_of(header_of({"spec": asked, "engine": {"stage_l2": l2}})) is strategy
    if l2 is None:
        assert strategy_of(header_of({"spec": asked, "engine": None})) is strategy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("l2", "severity", "words"),
    [
        (None, None, ""),
        (KEPT, Severity.NOTE, "an H200 let them go"),
        (IN_PART, Severity.NOTE, "50.0 % of the 60.0 MB of staged copies"),
        (REFUSED, Severity.WARNING, "did not persist in L2: this GPU sets no L2 aside"),
    ],
)
def test_copies_that_may_not_have_stayed_are_a_finding(l2: Any, severity: Any, words: str) -> None:
    run = make_run(blocks=3, aa=True, device="cuda")
    run = with_header(run, "engine", stage_l2=l2)
    found = [f for f in findings(run, summarise(run)) if f.kind is FindingKind.STAGE_L2]
    assert [f.severity for f in found] == ([] if severity is None else [severity])
    assert all(words in f.message and f.remedy for f in found)


def test_runs_that_hold_drafts_otherwise_can_be_compared_and_it_is_told() -> None:
    base = header_of({"spec": {"stage_by": "reference", "stage_l2": "normal"}})
    new = header_of({"spec": {"stage_by": "copy", "stage_l2": "normal"}})
    assert blocking_differences(base, new) == []
    assert [d.field for d in other_differences(base, new)] == ["spec.stage_by"]
    assert other_differences(header_of({"spec": {}}), new) == []
