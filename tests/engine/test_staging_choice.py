"""How a GPU is to hold drafts' K/V: from flag or file to the worker, and refused on a CPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, accept_arguments
from refusals import refused
from synthetic_run import header_of

from nwor_bench.analysis.comparing.preconditions import blocking_differences, other_differences
from nwor_bench.analysis.dram import strategy_of
from nwor_bench.engine import arguments as engine_config
from nwor_bench.errors import ExitCode
from nwor_bench.models.byte_model import BY_REFERENCE, COPY_SPILLED
from nwor_bench.records.store import read_run
from nwor_bench.records.types import StageBy
from nwor_bench.run import resume
from nwor_bench.run.prepare import PairChoice, resume_one, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_sweep
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.sweep_file import load_sweep, make_points

COPY = {"stage_by": "copy"}

pytestmark = pytest.mark.usefixtures("own_surroundings")


def spec(**changes: Any) -> RunSpec:
    return resolve(load_scenario("short"), requests=2, batches=3, **changes)


def test_drafts_are_held_by_reference_unless_asked_otherwise() -> None:
    assert spec().stage_by is StageBy.REFERENCE
    asked = spec(**COPY)
    assert asked.stage_by is StageBy.COPY
    plain = json.loads(json.dumps(asked.to_dict()))
    assert plain["stage_by"] == "copy"
    assert resume.stored_spec(header_of({"spec": plain})) == asked


@pytest.mark.parametrize(
    ("flags", "field", "wanted"),
    [
        ({"stage_by": "copi"}, "stage_by", {"value": "copi", "near": "copy"}),
        (
            {"stage_by": "copy", "nwor_modes": "off"},
            "stage_by",
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


def test_without_a_gpu_there_is_one_message_and_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_config, "on_cpu", lambda: True)
    with refused("stage_by", value="copy", naming="CUDA") as refusal:
        run_one(spec(**COPY), PairChoice(pair="tiny"), RunOptions(output=tmp_path / "run"))
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run").exists()


def test_the_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "on_cpu", lambda: False)
    for changes, by in (({}, "reference"), (COPY, "copy")):
        monkeypatch.setattr(os, "environ", {})
        engine_config.set_environment("bfloat16", 1, spec(**changes).worker_variables)
        assert os.environ["VLLM_NWOR_STAGE_BY"] == by


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
    assert read_run(folder).header.spec["stage_by"] == "copy"
    code = resume_one(folder, {}, engine_factory=lambda *_: FakeEngine(), **how)
    assert code is ExitCode.OK


def test_a_run_begun_before_there_was_a_choice_is_by_reference() -> None:
    plain = spec().to_dict()
    del plain["stage_by"]
    assert resume.stored_spec(header_of({"spec": plain})) == spec()


@pytest.mark.slow
def test_a_sweep_file_names_them_under_settings(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "it.toml"
    path.write_text('[axes]\npairs = ["tiny"]\n[settings]\nstage_by = "copy"')
    (point,) = make_points(load_sweep(path))
    assert point.spec.stage_by is StageBy.COPY
    assert run_sweep(path, RunOptions(dry_run=True)) is ExitCode.OK
    assert "mode stage: by copy" in capsys.readouterr().out.splitlines()
    path.write_text('[settings]\nstage_by = "copies"')
    with refused("it.toml: settings.stage_by", value="copies"):
        load_sweep(path)


@pytest.mark.parametrize(
    ("asked", "strategy"),
    [({}, BY_REFERENCE), ({"stage_by": "reference"}, BY_REFERENCE), (COPY, COPY_SPILLED)],
)
def test_the_prediction_is_that_of_what_was_done(asked: Any, strategy: Any) -> None:
    assert strategy_of(header_of({"spec": asked})) is strategy


def test_runs_that_hold_drafts_otherwise_can_be_compared_and_it_is_told() -> None:
    base = header_of({"spec": {"stage_by": "reference"}})
    new = header_of({"spec": {"stage_by": "copy"}})
    assert blocking_differences(base, new) == []
    assert [d.field for d in other_differences(base, new)] == ["spec.stage_by"]
    assert other_differences(header_of({"spec": {}}), new) == []
