"""How a GPU is to hold drafts' K/V: from flag or file to the worker, and refused on a CPU."""

import os
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import header_of

from nwor_bench.analysis.dram import strategy_of
from nwor_bench.analysis.stored_run import differences
from nwor_bench.engine import arguments as engine_config
from nwor_bench.engine import preflight
from nwor_bench.errors import ExitCode
from nwor_bench.models.byte_model import BY_REFERENCE, COPY_SPILLED
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import run_loaded
from nwor_bench.workload.config import RunSpec, load_scenario, resolve
from nwor_bench.workload.sweep_file import load_sweep

COPY = {"stage_by": "copy"}

pytestmark = pytest.mark.usefixtures("own_surroundings")


def spec(**changes: Any) -> RunSpec:
    return resolve(load_scenario("short"), requests=2, batches=3, **changes)


def test_the_workers_get_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_config, "on_cpu", lambda: False)
    for changes, by in (({}, "reference"), (COPY, "copy")):
        monkeypatch.setattr(os, "environ", {})
        engine_config.set_environment("bfloat16", 1, spec(**changes).worker_variables)
        assert os.environ["VLLM_NWOR_STAGE_BY"] == by


@pytest.mark.slow
def test_a_dry_run_of_a_sweep_file_says_how(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "uses_gpu", lambda: True)
    path = tmp_path / "it.toml"
    path.write_text('[axes]\npairs = ["tiny"]\n[settings]\nstage_by = "copy"')
    assert run_loaded(load_sweep(path), RunOptions(dry_run=True)) is ExitCode.OK
    assert "mode stage: by copy" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("asked", "strategy"),
    [({}, BY_REFERENCE), ({"stage_by": "reference"}, BY_REFERENCE), (COPY, COPY_SPILLED)],
)
def test_the_prediction_is_that_of_what_was_done(asked: Any, strategy: Any) -> None:
    assert strategy_of(header_of({"spec": asked})) is strategy


def test_runs_that_hold_drafts_otherwise_can_be_compared_and_it_is_reported() -> None:
    base = header_of({"spec": {"stage_by": "reference"}})
    new = header_of({"spec": {"stage_by": "copy"}})
    blocking, others = differences(base, new)
    assert blocking == []
    assert [difference.field for difference in others] == ["spec.stage_by"]
    assert differences(header_of({"spec": {}}), new) == ([], [])
