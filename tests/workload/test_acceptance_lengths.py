"""Acceptance lengths by number and by a model's name, in flags and in sweep files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine.arguments import engine_arguments
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.option_values import NAMED_LENGTHS
from nwor_bench.workload.sweep_file import load_sweep, make_points

KEY = "synthetic_acceptance_length"


def of(given: Any, drafts: int = 4, **more: Any) -> Any:
    """What the run's speculative_config says."""
    spec = resolve(load_scenario("short"), acceptance_length=given, draft_tokens=drafts, **more)
    return spec.speculative_config


@pytest.mark.parametrize(("name", "length"), NAMED_LENGTHS.items())
def test_a_name_stands_for_its_number(name: str, length: float) -> None:
    assert of(name) == of(name.upper()) == of(str(length)) == of(length) == {KEY: length}
    assert 1 < length < 5


def test_the_published_lengths() -> None:
    assert sorted(NAMED_LENGTHS.values()) == [2.54, 3.11, 3.22, 3.24, 3.33, 3.97]


@pytest.mark.parametrize(
    ("given", "drafts", "wanted"),
    [
        ("glm-5.2", 3, {"naming": "--draft-tokens 4"}),
        ("glm-5.2", 5, {"naming": "--draft-tokens 4"}),
        ("glm5.2", 4, {"near": "glm-5.2"}),
        ("3.4", 2, {"naming": "1 to 3"}),
        (0.9, 2, {"naming": "1 to 3"}),
        ("nan", 2, {"naming": "a number"}),
    ],
)
def test_what_no_window_gives_is_refused(given: Any, drafts: int, wanted: dict[str, Any]) -> None:
    with refused("--acceptance-length", value=given, **wanted):
        of(given, drafts)


def test_the_length_is_said_once() -> None:
    again = {"speculative_config": {KEY: 3.33}}
    assert of("glm-5.2", **again) == {KEY: 3.33}
    with refused("--acceptance-length", value="kimi-k3", naming="--speculative-config"):
        of("kimi-k3", **again)


def test_sweep_files_take_names_and_numbers(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[axes]\ndraft_tokens = [4]\nacceptance_length = ["qwen3.5", 2.6, 3]\n')
    points = make_points(load_sweep(path))
    assert [point.axes["acceptance_length"] for point in points] == [3.97, 2.6, 3.0]
    assert points[0].label.endswith("acceptance length 3.97")
    path.write_text('[axes]\ndraft_tokens = [2]\nacceptance_length = ["qwen3.5"]\n')
    field = "run 1 (smollm2, short): --acceptance-length"
    with refused(field, value="qwen3.5", naming="--draft-tokens 4"):
        make_points(load_sweep(path))


@pytest.mark.slow  # imports vLLM
def test_the_engine_is_told_the_method_that_the_length_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nwor_bench.engine.memory.kv_cache_bytes", lambda *_: 1)
    told = SimpleNamespace(
        target="t", dtype="float32", load_format=None, speculative_config=lambda _: {"model": "d"}
    )
    spec = resolve(load_scenario("short"), acceptance_length="2.6")
    config = engine_arguments(told, spec)["speculative_config"]  # type: ignore[arg-type]
    assert (config[KEY], config["rejection_sample_method"]) == (2.6, "synthetic")
    plain = engine_arguments(told, resolve(load_scenario("short")))  # type: ignore[arg-type]
    assert "rejection_sample_method" not in plain["speculative_config"]
