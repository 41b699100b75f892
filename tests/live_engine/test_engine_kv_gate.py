"""The K/V gate on real vLLM: sound runs pass bit for bit, and a planted fault is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import tiny_spec

from nwor_bench.errors import ExitCode
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.usefixtures("figures_left_out")]

Damage = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture(autouse=True)
def _environment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """run_one sets vLLM's switches for its process."""
    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "off" if "MODE" in name else "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def sweep(folder: Path, **changes: Any) -> tuple[ExitCode, dict[str, Any]]:
    """A real sweep of the tiny pair, its exit code and run.json."""
    modes = {
        "nwor_modes": "off,stage",
        "scv_modes": "off",
        "batches": 1,
        "warmup": 1,
        "max_warmup": 1,
    }
    spec = tiny_spec(**{**modes, **changes})
    code = run_one(spec, PairChoice(pair="tiny"), RunOptions(output=folder))
    return code, json.loads((folder / "run.json").read_text())


def plant(monkeypatch: pytest.MonkeyPatch, damage: Damage) -> None:
    """Let `damage` change what every commit writes: all layers' staged K and V."""
    from nwor_bench.plugin.runner_v1 import staging

    commit = staging.commit_staged_kv_cache_reference

    def wrong(key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> None:
        key, value = key.clone(), value.clone()
        damage(key, value)
        commit(key, value, *rest, **named)

    monkeypatch.setattr(staging, "commit_staged_kv_cache_reference", wrong)


def one_head_of_one_layer(key: torch.Tensor, value: torch.Tensor) -> None:
    """V of head 1 in layer 1 is off by a millionth."""
    value[1, :, 1] *= 1 + 1e-6


def keys_of_the_last_layer(key: torch.Tensor, value: torch.Tensor) -> None:
    """K of every head in layer 2 is off by a millionth."""
    key[2] *= 1 + 1e-6


def test_a_sound_run_is_equal_bit_for_bit(tmp_path: Path) -> None:
    code, run = sweep(tmp_path / "run", scv_modes="off,graph")
    assert code is ExitCode.OK
    gate = run["kv_gate"]
    assert set(gate["cells"]) == {"stage x off", "stage x graph"}
    for cell in gate["cells"].values():
        assert cell["verdict"] == "equal bit for bit"
        assert cell["checked"] == cell["committed"] > 8 * 40
        assert cell["unknown"] == cell["beyond_budget"] == 0
        assert (cell["layers"], cell["ranks"]) == (3, 1)
    assert 0 < gate["seconds"] < gate["gate_seconds"]
    events = [
        json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()
    ]
    told = [event["verdict"] for event in events if event.get("event") == "kv_gate"]
    assert told == ["equal bit for bit"] * 2


@pytest.mark.parametrize(
    ("damage", "layer", "place"),
    [
        (one_head_of_one_layer, 1, ", V, head 1 "),
        pytest.param(keys_of_the_last_layer, 2, ", K, head 0 "),
    ],
)
def test_wrong_values_that_no_token_tells_are_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, layer: int, place: str
) -> None:
    plant(monkeypatch, damage)
    code, run = sweep(tmp_path / "run")
    assert code is ExitCode.CORRECTNESS_BROKEN
    reason = run["parity"]["broken"]["stage x off"]
    name = f"model.layers.{layer}.self_attn.attn"
    assert reason.startswith(f"K/V: layer {layer} ({name}), request ")
    assert place in reason
    assert run["kv_gate"]["cells"]["stage x off"]["verdict"] == "INVALID"
