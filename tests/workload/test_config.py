"""Scenarios and command-line values are merged and checked in one place."""

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.engine.arguments import engine_arguments
from nwor_bench.errors import ConfigError
from nwor_bench.workload.config import Scenario, load_scenario, resolve, scenario_names
from nwor_bench.workload.run_spec import MAX_DRAFT_TOKENS
from nwor_bench.workload.sweep_file import load_sweep, make_points
from nwor_bench.workload.toml_file import resource_dir

SCENARIO = Scenario(
    name="base",
    requests=8,
    batches=5,
    warmup=1,
    draft_tokens=4,
    max_new_tokens=48,
    max_model_len=1024,
)

TOML = """
requests = 2
batches = 3
draft_tokens = 4
max_new_tokens = 8
max_model_len = 64
[prompts]
path = "mine/prompts.jsonl"
"""


def test_nothing_given_leaves_the_scenario_as_it_is() -> None:
    spec = resolve(SCENARIO)
    assert spec.scenario == SCENARIO
    assert (spec.seed, spec.tensor_parallel_size, spec.engine_args) == (0, 1, {})
    assert spec.speculative_config is None


def test_flags_replace_the_scenarios_values() -> None:
    given_values = {
        "requests": 3,
        "batches": 7,
        "warmup": 0,
        "draft_tokens": 2,
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_model_len": 256,
        "ignore_eos": False,
    }
    spec = resolve(SCENARIO, **given_values, seed=11)
    assert spec.scenario == SCENARIO.model_copy(update=given_values)
    assert spec.seed == 11


GRID = [f"{nwor} x {scv}" for nwor in ("off", "stage") for scv in ("off", "graph", "adaptive")]
AA_LABEL = "off x off (A/A)"


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({}, [*GRID, AA_LABEL]),
        ({"scv_modes": "off, graph"}, [*GRID[:2], *GRID[3:5], AA_LABEL]),
        ({"cells": "stage-graph"}, [GRID[0], GRID[4], AA_LABEL]),
        ({"cells": "off-graph", "interleave": "windows"}, [*GRID[:2], AA_LABEL]),
        # The control comes with mode stage in interleaved windows, once.
        (
            {"cells": "stage-graph", "interleave": "windows"},
            [GRID[0], GRID[4], "control x off", AA_LABEL],
        ),
        ({"interleave": "windows"}, [*GRID, "control x off", AA_LABEL]),
        ({"interleave": "windows", "nwor_modes": "off"}, [*GRID[:3], AA_LABEL]),
        ({"nwor_modes": "off,stage,control"}, [*GRID, "control x off", AA_LABEL]),
    ],
)
def test_the_cells_of_a_grid(given: dict[str, Any], labels: list[str]) -> None:
    assert [cell.label for cell in resolve(SCENARIO, **given).experiment.cells("p")] == labels


def test_a_prompt_must_have_room_beside_the_output_and_the_drafts() -> None:
    assert resolve(SCENARIO, max_model_len=53).scenario.max_model_len == 53


def test_draft_tokens_come_from_vllms_speculative_config() -> None:
    config = '{"method": "eagle", "num_speculative_tokens": 7}'
    spec = resolve(SCENARIO, speculative_config=config)
    assert spec.scenario.draft_tokens == 7
    assert spec.speculative_config == {"method": "eagle", "num_speculative_tokens": 7}
    same = resolve(SCENARIO, draft_tokens=7, speculative_config=config)
    assert same == spec


@given(
    st.builds(
        dict,
        requests=st.none() | st.integers(-2, 5),
        batches=st.none() | st.integers(-2, 5),
        draft_tokens=st.none() | st.integers(-2, 5),
        max_new_tokens=st.none() | st.integers(-2, 5),
        max_model_len=st.none() | st.integers(-2, 12),
        temperature=st.none() | st.floats(),
        seed=st.none() | st.integers(),
    )
)
def test_whatever_resolves_keeps_the_rules(overrides: dict[str, int | None]) -> None:
    try:
        spec = resolve(SCENARIO, **overrides)
    except ConfigError:
        return
    s = spec.scenario
    assert min(s.requests, s.draft_tokens, s.max_new_tokens) >= 1
    assert s.batches >= 0
    assert 0 <= s.temperature < float("inf")
    assert s.max_new_tokens + s.draft_tokens < s.max_model_len
    assert 0 <= spec.seed < 2**32


def test_a_users_file_takes_its_name_and_its_paths_from_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "my-load.toml"
    path.write_text(TOML)
    scenario = load_scenario(path)
    assert scenario.name == "my-load"
    assert scenario.prompts.path == tmp_path / "mine" / "prompts.jsonl"
    path.write_text('name = "other"\n' + TOML.replace("mine/", "/abs/"))
    assert load_scenario(str(path)).name == "other"
    assert load_scenario(path).prompts.path == Path("/abs/prompts.jsonl")


def test_shipped_scenarios() -> None:
    shipped = "ctx-1k ctx-256 ctx-8k long medium mixed short"
    assert scenario_names() == tuple(shipped.split())
    for name in scenario_names():
        assert load_scenario(name).name == name
        resolve(load_scenario(name))


def test_the_example_in_the_comments_of_a_shipped_scenario_loads(tmp_path: Path) -> None:
    text = (resource_dir("scenarios") / "short.toml").read_text()
    head, example = text.split("\n[prompts]")[0], text[text.index("# [prompts]") :]
    path = tmp_path / "example.toml"
    path.write_text(head + "\n" + re.sub(r"^# ", "", example, flags=re.MULTILINE))
    assert load_scenario(path).prompts.path == tmp_path / "my-prompts.jsonl"


# Acceptance lengths.


KEY = "synthetic_acceptance_length"


def of(given: Any, drafts: int = 4, **more: Any) -> Any:
    """What the run's speculative_config says."""
    spec = resolve(load_scenario("short"), acceptance_length=given, draft_tokens=drafts, **more)
    return spec.speculative_config


def test_the_longest_and_the_shortest_length_are_taken() -> None:
    for edge in (1.0, 3.0):
        assert of(edge, 2) == {KEY: edge}


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


def test_a_window_has_no_more_drafts_than_vllm_verifies() -> None:
    assert resolve(SCENARIO, draft_tokens=128, max_model_len=4096).scenario.draft_tokens == 128
    with refused("--draft-tokens", value=129, naming="MAX_SPEC_LEN"):
        resolve(SCENARIO, draft_tokens=129, max_model_len=4096)
    (package,) = find_spec("vllm").submodule_search_locations  # type: ignore[union-attr,misc]
    source = Path(package, "v1", "sample", "rejection_sampler.py").read_text()
    assert f"MAX_SPEC_LEN = {MAX_DRAFT_TOKENS}\n" in source
