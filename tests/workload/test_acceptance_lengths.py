"""Acceptance lengths in flags and in sweep files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from nwor_bench.engine.arguments import engine_arguments
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.sweep_file import load_sweep, make_points

KEY = "synthetic_acceptance_length"


def of(given: Any, drafts: int = 4, **more: Any) -> Any:
    """What the run's speculative_config says."""
    spec = resolve(load_scenario("short"), acceptance_length=given, draft_tokens=drafts, **more)
    return spec.speculative_config


@pytest.mark.parametrize(("given", "drafts"), [("3.1", 2), (0.9, 2), ("nan", 2)])
def test_what_no_window_gives_is_refused(given: Any, drafts: int) -> None:
    with refused("--acceptance-length", value=given, naming="1 to 3"):
        of(given, drafts)
    for edge in (1.0, 3.0):
        assert of(edge, drafts) == {KEY: edge}


def test_the_length_is_said_once() -> None:
    again = {"speculative_config": {KEY: 3.33}}
    assert of("3.33", **again) == of(3.33) == {KEY: 3.33}
    with refused("--acceptance-length", value="3.2", naming="--speculative-config"):
        of("3.2", **again)


def test_a_sweep_files_length_is_in_the_label(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[axes]\ndraft_tokens = [4]\nacceptance_length = [2.6, 3]\n")
    points = make_points(load_sweep(path))
    assert [point.axes["acceptance_length"] for point in points] == [2.6, 3.0]
    assert points[0].label.endswith("acceptance length 2.6")


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
