"""`nwor-bench supports` of every recipe and of a quantised checkpoint; golden has its pages."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from recipe_models import CONTENT

from nwor_bench.models.methods import Method

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"
LLAMA = str(CONFIGS / "Llama-3.2-3B.json")
HYBRID = str(CONFIGS / "Qwen3.5-27B.json")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def supports(command_line: Run) -> Run:
    return partial(command_line, "supports")


def flat(text: str) -> str:
    return " ".join(text.split())


def told(supports: Run, *arguments: str) -> Any:
    code, out, err = supports(*arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_every_recipe_model_has_an_answer(supports: Run) -> None:
    for entry in CONTENT["models"]:
        Path("config.json").write_text(json.dumps(entry["config"]))
        found = told(supports, "config.json")
        assert {each["method"] for each in found["methods"]} == set(Method)


def test_a_checkpoint_with_an_fp8_cache_is_one_without_a_flag(
    supports: Run, command_line: Run, tmp_path: Path
) -> None:
    """vLLM takes `auto` so; a flag stands above it."""
    quantised = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = json.loads(Path(LLAMA).read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    on_cpu = ("config.json", "--device", "cpu", "-q")
    assert "cache_dtype:fp8" in supports(*on_cpu)[1]
    assert "cache_dtype" not in supports(*on_cpu, "--cache-dtype", "bfloat16")[1]
    plan = ("plan", "--config", "config.json", "--weight-dtype", "fp8")
    assert "Cache in fp8" in flat(command_line(*plan)[1])
    assert "Cache in bfloat16" in flat(command_line(*plan, "--cache-dtype", "bfloat16")[1])
