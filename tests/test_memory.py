"""Memory asked for before a start: bytes counted by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from nwor_bench.config import Overrides, SweepSpec, resolve
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.memory import (
    GIB,
    RUNTIME_BYTES,
    UNKNOWN_MODEL_CACHE,
    cache_bytes_per_token,
    kv_cache_bytes,
    require_memory,
)
from nwor_bench.pairs import ResolvedPair
from nwor_bench.scenario import Scenario

SCENARIO = Scenario(
    name="toy", requests=8, batches=1, draft_tokens=4, max_new_tokens=8, max_model_len=1000
)
TARGET = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 100,
}


def pair_of(folder: Path, *configs: dict[str, Any] | str) -> ResolvedPair:
    models = []
    for number, config in enumerate(configs):
        if isinstance(config, str):
            models.append(config)
            continue
        place = folder / f"model-{number}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        models.append(str(place))
    draft = models[1] if len(models) > 1 else None
    return ResolvedPair("toy", "draft_model" if draft else "ngram", models[0], draft, "float32")


def spec_with(**options: Any) -> SweepSpec:
    return resolve(SCENARIO, Overrides(), **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # K and V x 3 layers x 2 heads x 32 values x 4 bytes
        (TARGET, 2 * 3 * 2 * 32 * 4),
        ({**TARGET, "num_key_value_heads": None}, 2 * 3 * 4 * 32 * 4),
        ({**TARGET, "head_dim": None}, 2 * 3 * 2 * 25 * 4),
        ({"text_config": TARGET}, 2 * 3 * 2 * 32 * 4),
    ],
)
def test_bytes_of_one_token(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    assert cache_bytes_per_token(pair_of(tmp_path, config)) == expected


def test_target_and_drafter_share_the_cache(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, TARGET, {**TARGET, "num_hidden_layers": 1})
    assert cache_bytes_per_token(pair) == 1536 + 512


@pytest.mark.parametrize("models", [("org/name",), (TARGET, "org/name"), ({"n_layer": 12},)])
def test_a_model_of_unknown_size_gets_a_fixed_cache(tmp_path: Path, models: tuple) -> None:
    pair = pair_of(tmp_path, *models)
    assert cache_bytes_per_token(pair) is None
    assert kv_cache_bytes(pair, spec_with()) == UNKNOWN_MODEL_CACHE


@pytest.mark.parametrize(("block_size", "length"), [(None, 1024), (16, 1008), (64, 1024)])
def test_the_cache_holds_all_requests_in_whole_blocks(
    tmp_path: Path, block_size: int | None, length: int
) -> None:
    spec = spec_with(block_size=block_size)
    expected = 1536 * 8 * length + 1536 * 8 * length // 4
    assert kv_cache_bytes(pair_of(tmp_path, TARGET), spec) == expected


def test_the_flag_sets_the_cache(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, TARGET)
    assert kv_cache_bytes(pair, spec_with(kv_cache_gib=2.5)) == 2_684_354_560


def free(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))


def test_weights_cache_and_runtime_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(tmp_path, TARGET, TARGET)
    for model in (pair.target, pair.draft):
        assert model is not None
        (Path(model) / "model.safetensors").write_bytes(b"x" * 1000)
    needed = GIB + 2 * 2000 + RUNTIME_BYTES
    free(monkeypatch, needed)
    require_memory(pair, spec_with(kv_cache_gib=1.0))
    free(monkeypatch, needed - 1)
    with pytest.raises(ConfigError, match=r"--kv-cache-gib: '1'.*no free memory") as caught:
        require_memory(pair, spec_with(kv_cache_gib=1.0))
    assert caught.value.exit_code == ExitCode.BAD_USAGE


def test_without_the_flag_the_message_names_what_asks_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, GIB)
    with pytest.raises(ConfigError, match=r"--requests x --max-model-len: '8 x 1000'"):
        require_memory(pair_of(tmp_path, TARGET), spec_with())
