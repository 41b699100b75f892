"""vLLM's names for our flags, and the user's own prompts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from nwor_bench.errors import ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.workload.config import load_scenario, resolve

Run = Callable[..., tuple[int, str, str]]

TINY = ("sweep", "--pair", "tiny", "--batches", "1", "--max-new-tokens", "6", "--output", "run")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings", "engine")]


def test_vllms_names(command_line: Run) -> None:
    code, _, err = command_line(
        *TINY, "--num-prompts", "3", "--num-speculative-tokens", "2", "--kv-cache-dtype", "fp8"
    )
    assert (code, err) == (0, "")
    spec = read_run(Path("run")).header.spec or {}
    assert (spec["scenario"]["requests"], spec["scenario"]["draft_tokens"]) == (3, 2)
    assert spec["engine_args"] == {"kv_cache_dtype": "fp8"}


def test_an_alias_and_an_engine_argument_must_agree(command_line: Run) -> None:
    arguments = ("--kv-cache-dtype", "fp8", "--engine-args", '{"kv_cache_dtype": "auto"}')
    code, _, err = command_line("sweep", *arguments)
    assert code == ExitCode.BAD_USAGE
    assert "--cache-dtype: 'fp8' is invalid; --engine-args says kv_cache_dtype 'auto'" in err


def test_a_model_that_the_hub_does_not_give(
    command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a network it would be asked for five times, for 45 seconds in all.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = command_line("sweep", "--model", "no/where")
    assert code == ExitCode.BAD_USAGE
    assert "--target-model: 'no/where'" in err


def test_both_ways_to_say_the_same() -> None:
    spec = resolve(load_scenario("short"), cache_dtype="fp8", engine_args={"kv_cache_dtype": "fp8"})
    assert spec.engine_args == {"kv_cache_dtype": "fp8"}


def write(path: str, *rows: object) -> None:
    Path(path).write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def test_own_prompts_with_the_scenarios_other_values(command_line: Run, engine: FakeEngine) -> None:
    write("mine.jsonl", {"prompt": "What is a cache?"}, {"text": "Why?"}, {"text": "How long?"})
    engine.failing[9] = KeyboardInterrupt()
    code, _, _ = command_line(*TINY, "--prompts", "mine.jsonl", "--requests", "2")
    assert code == ExitCode.INTERRUPTED
    header = read_run(Path("run")).header
    assert (header.scenario or {})["prompts"]["path"] == "mine.jsonl"
    used = {name for block in header.blocks or () for name in block.prompt_ids or ()}
    assert used <= {"line-1", "line-2", "line-3"}
    engine.failing.clear()
    assert command_line("sweep", "--resume", "run")[0] == 0
