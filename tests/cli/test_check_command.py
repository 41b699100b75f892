"""`nwor-bench check`: what it asks for, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.cli.commands.check import check_file
from nwor_bench.errors import NotComparableError
from nwor_bench.records.cell import Drafts
from nwor_bench.records.types import AA
from nwor_bench.workload.run_spec import RunSpec
from nwor_bench.workload.sweep_file import group_by_engine, make_points

pytestmark = [
    pytest.mark.slow,  # imports pydantic and more
    pytest.mark.usefixtures("never_started"),
]


def call(*words: str) -> None:
    CliRunner().invoke(app, ["check", *words], catch_exceptions=False)


def specs(model: str = "tiny", requests: tuple[int, ...] = (1, 4), **flags: Any) -> list[RunSpec]:
    return [point.spec for point in make_points(check_file(model, requests, flags))]


def test_two_stock_engines_run_all_batch_sizes_and_nothing_is_timed() -> None:
    points = make_points(check_file("tiny", (1, 8), {}))
    assert [point.spec.scenario.requests for point in points] == [8, 1]
    (group,) = group_by_engine(points)
    assert list(group.spec.engine_specs) == [None, Drafts(4)]  # A/A is the first one again
    for spec in (point.spec for point in points):
        assert spec.checks_only
        assert not spec.stages
        assert spec.worker_variables["VLLM_NWOR_CPU_ATTENTION"] == "stock"
        cells = [(cell.label, cell.arm) for cell in spec.experiment.cells("tiny")]
        assert [label for label, _ in cells] == ["k = 0", "k = 4", "off x off (A/A)"]
        assert cells[-1][1] is AA


@pytest.mark.parametrize(
    ("flags", "drafts"),
    [
        ({}, 4),
        ({"draft_tokens": 2}, 2),
        ({"speculative_config": '{"num_speculative_tokens": 3}'}, 3),
    ],
)
def test_the_drafts_are_what_any_flag_says(flags: dict[str, Any], drafts: int) -> None:
    assert {spec.draft_counts for spec in specs(**flags)} == {(0, drafts)}


def test_flags_reach_every_run() -> None:
    given = {"dtype": "bfloat16", "max_new_tokens": 9, "engine_args": '{"block_size": 16}',
             "max_model_len": 99, "scenario": "ctx-1k", "seed": 7}  # fmt: skip
    for spec in specs(**given):
        assert (spec.dtype, spec.engine_args, spec.seed) == ("bfloat16", {"block_size": 16}, 7)
        assert (spec.scenario.max_new_tokens, spec.scenario.max_model_len) == (9, 99)


def test_a_model_is_a_pair_or_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("tiny", "own.toml"):
        choice = check_file(model, (1,), {}).choice(model)
        assert (choice.pair, choice.target_model) == (model, None)
    own = check_file("org/name", (1,), {"draft_model": "org/draft"}).choice("smollm2")
    assert (own.pair, own.target_model, own.draft_model) == (None, "org/name", "org/draft")
    with refused("MODEL", value="tinny", near="tiny"):
        call("tinny")
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert check_file("tiny", (1,), {}).choice("smollm2").target_model == "tiny"  # as for `plan`


@pytest.mark.parametrize("method", ["synthetic", "fly"])
def test_a_lossy_method_is_not_checked(method: str) -> None:
    config = json.dumps({"rejection_sample_method": method})
    with refused("NOT CHECKED", NotComparableError, value=method):
        call("tiny", "--speculative-config", config)
    with refused("NOT CHECKED", NotComparableError, value="synthetic"):
        call("llama-3b-shape")


def test_a_contradiction_is_refused() -> None:
    config = '{"num_speculative_tokens": 2}'
    with refused("--draft-tokens", value=3, naming="num_speculative_tokens 2"):
        call("tiny", "--draft-tokens", "3", "--speculative-config", config)
    with refused("--requests", value="0"):
        call("tiny", "--requests", "0")
