"""`nwor-bench worth`: what it asks for, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.analysis.draft_rates import MIN_JUDGED
from nwor_bench.cli.app import app
from nwor_bench.cli.commands.worth import WorthOptions, worth_sweep
from nwor_bench.engine.arguments import engine_arguments
from nwor_bench.engine.preflight import check_pair
from nwor_bench.models.methods import NOT_ON_CPU, Method
from nwor_bench.models.pairs import ResolvedPair, load_pair
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import PairChoice, RunSpec
from nwor_bench.workload.sweep_file import SweepFile, group_by_engine, make_points

pytestmark = [
    pytest.mark.slow,  # imports pydantic and more
    pytest.mark.usefixtures("never_started"),
]


def asked(**options: Any) -> SweepFile:
    """What the command asks for with up to 3 drafts, unless these options say otherwise."""
    given = {"pair": "tiny", "max_draft_tokens": 3, "time_budget_s": 60.0, "dtype": "float32"}
    return worth_sweep(WorthOptions(**{**given, **options}))


def call(*words: str) -> None:
    CliRunner().invoke(app, ["worth", *words], catch_exceptions=False)


def specs_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[RunSpec]:
    """Specs of the runs that a command line asks for, as they are checked."""
    asked: list[RunSpec] = []
    monkeypatch.setattr(
        "nwor_bench.engine.preflight.check_sweep",
        lambda sweep: asked.extend(point.spec for point in make_points(sweep)),
    )
    with pytest.raises(AssertionError, match="not refused"):
        call(*words)
    return asked


def test_long_prompts_have_room_if_they_are_given_it() -> None:
    (point, *_) = make_points(asked(requests=(1,), max_model_len=26000))
    assert point.spec.scenario.max_model_len == 26000


@pytest.mark.parametrize("method", [m for m in Method if m.value not in
                                    ("eagle", "eagle3", "mtp", "draft_model")])  # fmt: skip
def test_methods_that_cannot_change_their_count_are_refused_by_name(method: Method) -> None:
    pair = ResolvedPair("own", method, "target", None, "float32")
    spec = resolve(load_scenario("short"), draft_counts=[0, 4], nwor_modes="off", scv_modes="off")
    with refused("--method", value=method, naming="--engines"):
        check_pair(pair, spec)
    if method not in NOT_ON_CPU:
        check_pair(pair, replace(spec, engines=True))


@pytest.mark.parametrize(
    ("words", "engines"),
    [
        (["--pair", "tiny"], False),
        (["--pair", "tiny", "--engines"], True),
        (["--pair", "tiny-ngram"], True),
        (["--pair", "tiny", "--method", "ngram"], True),
    ],
)
def test_a_method_with_one_count_gets_an_engine_for_each(
    words: list[str], engines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = specs_of(monkeypatch, *words, "--requests", "1,2")
    assert {spec.engines for spec in specs} == {engines}
    assert {spec.stopping.blocks for spec in specs} == {MIN_JUDGED if engines else 1}


@pytest.mark.parametrize(("gpu", "batches"), [(True, (1, 1)), (False, (0, 0))])
def test_engines_warm_up_on_a_gpu(
    gpu: bool, batches: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There kernels compile for the batches of a timed block, longer than those of the gate."""
    monkeypatch.setattr("nwor_bench.instruments.device.uses_gpu", lambda: gpu)
    specs = specs_of(monkeypatch, "--pair", "tiny", "--engines")
    assert {spec.warmup_batches for spec in specs} == {batches}


def test_engine_arguments_reach_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = specs_of(
        monkeypatch, "--pair", "tiny", "--requests", "1,2", "--engine-args", '{"block_size": 16}'
    )
    assert [spec.engine_args for spec in specs] == [{"block_size": 16}] * 2


@pytest.mark.parametrize(
    ("gpu", "words", "sizes"),
    [
        (True, [], [1, 2, 3, 8, 16, 24]),
        (True, ["--engine-args", '{"compilation_config": {"mode": 0}}'], [1, 2, 3, 8, 16, 24]),
        (
            True,
            ["--engine-args", '{"compilation_config": {"cudagraph_capture_sizes": [8]}}'],
            [8],
        ),
        (True, ["--engine-args", '{"compilation_config": 0}'], None),
        (True, ["--engines"], None),
        (False, [], None),
    ],
)
def test_a_gpu_captures_the_windows_that_are_compared(
    gpu: bool, words: list[str], sizes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nwor_bench.instruments.device.uses_gpu", lambda: gpu)
    specs = specs_of(
        monkeypatch, "--pair", "tiny", "--requests", "1,8", "--max-draft-tokens", "2", *words
    )
    for spec in specs:
        graphs = spec.engine_args.get("compilation_config") or {}
        assert graphs.get("cudagraph_capture_sizes") == sizes
        assert graphs.get("mode") == (0 if '"mode"' in " ".join(words) else None)


def test_one_engine_runs_all_batch_sizes() -> None:
    points = make_points(asked(requests=(1, 2, 8)))
    # The largest has most of the time, and the first run compiles kernels.
    assert [point.spec.scenario.requests for point in points] == [8, 2, 1]
    (group,) = group_by_engine(points)
    assert group.spec.scenario.requests == 8
    labels = [cell.label for cell in points[0].spec.experiment.cells("tiny")]
    assert labels == ["k = 0", "k = 1", "k = 2", "k = 3", "off x off (A/A)"]
    shares = [point.spec.time_budget_s for point in points]
    assert sum(share or 0 for share in shares) == pytest.approx(60, abs=0.3)
    assert shares == sorted(shares, key=lambda share: share or 0, reverse=True)
    assert points[0].spec.scenario.draft_tokens == 3
    (small,) = group_by_engine(make_points(asked(requests=(1,))))
    assert small.spec.scenario.requests == 4  # vLLM names a count for each batch size
    several = make_points(asked(requests=(1,), engines=True))
    assert group_by_engine(several)[0].spec.scenario.requests == 1  # each engine has one count


def test_the_largest_count_is_what_the_engine_drafts() -> None:
    """A sweep file needs no `draft_tokens` beside `draft_counts`; the scenario has 4."""
    given = {"nwor_modes": "off", "scv_modes": "off"}
    spec = resolve(load_scenario("short"), draft_counts=[0, 2, 1], **given)
    assert spec.scenario.draft_tokens == 2


def test_scenarios_share_the_engine_and_the_budget() -> None:
    points = make_points(asked(scenario="short,ctx-256", requests=(1, 256)))
    assert [(p.scenario, p.spec.scenario.requests) for p in points] == [
        (scenario, size) for scenario in ("short", "ctx-256") for size in (256, 1)
    ]
    assert sum(point.spec.time_budget_s or 0 for point in points) == pytest.approx(60, abs=0.3)
    assert len(group_by_engine(points)) == 1


@pytest.mark.parametrize(
    ("gpu", "scv"), [(True, ScvMode.ADAPTIVE), (False, ScvMode.OFF)]
)  # fmt: skip
def test_each_count_but_0_is_staged_too(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, scv: ScvMode
) -> None:
    """With SCV adaptive; it cannot run without CUDA, where the host decides."""
    monkeypatch.setattr("nwor_bench.instruments.device.uses_gpu", lambda: gpu)
    specs = specs_of(
        monkeypatch, "--pair", "tiny", "--nwor-modes", "off,stage", "--max-draft-tokens", "2"
    )
    cells = specs[0].experiment.cells("tiny")
    assert [(c.drafts, c.nwor_mode, c.scv_mode) for c in cells if c.drafts] == [
        (k, *modes)
        for k in (1, 2)
        for modes in ((NworMode.OFF, ScvMode.OFF), (NworMode.STAGE, scv))
    ]
    assert cells[0].is_baseline
    assert specs[0].worker_variables["VLLM_NWOR_CPU_ATTENTION"] == "reference"
    with pytest.raises(AssertionError, match="not refused"):
        call("--pair", "tiny", "--max-draft-tokens", "2")
    assert {cell.nwor_mode for cell in specs[-1].experiment.cells("tiny")} == {NworMode.OFF}
    assert specs[-1].worker_variables["VLLM_NWOR_CPU_ATTENTION"] == "stock"


def test_named_rates_replace_those_of_a_shape() -> None:
    sweep = asked(pair="llama-3b-shape", requests=(8,), acceptance_rates=[0.8, 0.6, 0.5])
    (point,) = make_points(sweep)
    own = load_pair("llama-3b-shape")
    pair = ResolvedPair(own.name, own.method, "t", "d", own.dtype, dict(own.speculative))
    found = engine_arguments(pair, point.spec)["speculative_config"]
    assert found["synthetic_acceptance_rates"] == [0.8, 0.6, 0.5]
    assert found["rejection_sample_method"] == "synthetic"
    assert "synthetic_acceptance_length" not in found


def test_adaptive_verification_is_refused_by_name() -> None:
    pair = ResolvedPair("own", "eagle", "t", "d", "float32", {"enable_adaptive_verification": True})
    spec = resolve(load_scenario("short"), draft_counts=[0, 4], nwor_modes="off", scv_modes="off")
    with refused("--speculative-config: enable_adaptive_verification", value=True):
        check_pair(pair, spec)


def test_own_models_stand_in_a_sweep_file(tmp_path: Path) -> None:
    own = {"target_model": str(tmp_path / "mine"), "draft_model": "d", "method": "eagle"}
    (point,) = make_points(asked(pair=None, requests=(4,), **own))
    assert point.choice == PairChoice(None, str(tmp_path / "mine"), "d", "eagle")
    assert point.pair == "mine"
