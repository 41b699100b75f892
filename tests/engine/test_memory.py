"""Memory asked for before a start: bytes counted by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from refusals import refused

from nwor_bench.engine import memory
from nwor_bench.engine.memory import (
    GIB,
    HEADROOM,
    RUNTIME_BYTES,
    UNKNOWN_MODEL_CACHE,
    cache_bytes_per_token,
    kv_cache_bytes,
    require_memory,
)
from nwor_bench.errors import ExitCode
from nwor_bench.instruments import device
from nwor_bench.instruments.device import FreeMemory
from nwor_bench.models.pairs import ResolvedPair, resolve_pair
from nwor_bench.workload.config import RunSpec, Scenario, resolve

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


def pair_of(
    folder: Path, *configs: dict[str, Any] | str, dtype: str = "float32", dummy: bool = False
) -> ResolvedPair:
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
    method = "draft_model" if draft else "ngram"
    load_format = "dummy" if dummy else None
    return ResolvedPair("toy", method, models[0], draft, dtype, load_format=load_format)


def spec_with(**options: Any) -> RunSpec:
    return resolve(SCENARIO, **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # K and V x 3 layers x 2 heads x 32 values x 4 bytes
        (TARGET, 2 * 3 * 2 * 32 * 4),
        ({**TARGET, "num_key_value_heads": None}, 2 * 3 * 4 * 32 * 4),
        ({**TARGET, "head_dim": None}, 2 * 3 * 2 * 25 * 4),
        ({"text_config": TARGET}, 2 * 3 * 2 * 32 * 4),
        # MiMo V2: narrower values, and more heads where it slides.
        ({**TARGET, "v_head_dim": 24}, 3 * 2 * (32 + 24) * 4),
        (
            {**TARGET, "v_head_dim": 24, "swa_num_key_value_heads": 4, "swa_v_head_dim": 28},
            3 * 4 * (32 + 28) * 4,
        ),
        # Gemma 4: wider heads where it does not slide.
        ({**TARGET, "model_type": "gemma4_text", "global_head_dim": 64}, 3 * 2 * 2 * 64 * 4),
        # Files that leave out what transformers fills in: heads of all of the hidden size, at most.
        ({"num_hidden_layers": 3, "hidden_size": 100}, 2 * 3 * 100 * 4),
        ({"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}, 2 * 3 * 2 * 32 * 4),
        # MLA keeps one latent row and its rotary part a layer, whatever the heads.
        ({**TARGET, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 3 * (512 + 64) * 4),
        (
            {**TARGET, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            3 * (512 + 64 + 128) * 4,
        ),
        # dots3: sliding layers have rows of their own.
        ({**TARGET, "kv_lora_rank": 512, "swa_kv_lora_rank": 1024}, 3 * 1024 * 4),
    ],
)
def test_bytes_of_one_token(tmp_path: Path, config: dict[str, Any], expected: int) -> None:
    assert cache_bytes_per_token(pair_of(tmp_path, config), spec_with()) == expected


@pytest.mark.parametrize(
    ("dtype", "flag", "cache", "element"),
    [
        ("bfloat16", None, None, 2),
        ("bfloat16", "float32", None, 4),
        ("float32", "float16", "auto", 2),
        ("float32", None, "fp8", 1),
        ("float32", None, "fp8_e5m2", 1),
        ("bfloat16", None, "float32", 4),
        # The config.json decides; without a dtype there, vLLM's default half precision.
        ("auto", None, None, 2),
    ],
)
def test_bytes_of_an_element(
    tmp_path: Path, dtype: str, flag: str | None, cache: str | None, element: int
) -> None:
    arguments = None if cache is None else json.dumps({"kv_cache_dtype": cache})
    spec = spec_with(dtype=flag, engine_args=arguments)
    pair = pair_of(tmp_path, TARGET, dtype=dtype)
    assert cache_bytes_per_token(pair, spec) == 2 * 3 * 2 * 32 * element


@pytest.mark.parametrize(
    ("asked", "drafter", "element"), [(None, None, 1), ("auto", None, 1), ("bfloat16", None, 2),
                                      (None, TARGET, 1)],
)  # fmt: skip
def test_a_checkpoint_may_ask_for_an_fp8_cache(
    tmp_path: Path, asked: str | None, drafter: dict[str, Any] | None, element: int
) -> None:
    """The target's checkpoint decides for the drafter's layers too: they share the cache."""
    scheme = {"type": "float", "num_bits": 8, "dynamic": False}
    quantised = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    models = [{**TARGET, "quantization_config": quantised}, *([drafter] if drafter else [])]
    arguments = None if asked is None else json.dumps({"kv_cache_dtype": asked})
    pair = pair_of(tmp_path, *models, dtype="bfloat16")
    per_token = cache_bytes_per_token(pair, spec_with(engine_args=arguments))
    assert per_token == len(models) * 2 * 3 * 2 * 32 * element


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_an_automatic_dtype_is_the_models(tmp_path: Path, name: str) -> None:
    pair = pair_of(tmp_path, {**TARGET, name: "bfloat16"}, dtype="auto")
    assert cache_bytes_per_token(pair, spec_with()) == 2 * 3 * 2 * 32 * 2


def test_target_and_drafter_share_the_cache(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, TARGET, {**TARGET, "num_hidden_layers": 1})
    assert cache_bytes_per_token(pair, spec_with()) == 1536 + 512


@pytest.mark.parametrize("models", [
    ("org/name",), (TARGET, "org/name"), ({"n_layer": 12},), ({**TARGET, "head_dim": "32"},),
    ({**TARGET, "num_key_value_heads": [2, 2, 1]},),
])  # fmt: skip
def test_a_model_of_unknown_size_gets_a_fixed_cache(tmp_path: Path, models: tuple) -> None:
    pair = pair_of(tmp_path, *models)
    assert cache_bytes_per_token(pair, spec_with()) is None
    assert kv_cache_bytes(pair, spec_with()) == UNKNOWN_MODEL_CACHE


@pytest.mark.parametrize(
    ("block_size", "length", "block"), [(None, 1024, 128), (16, 1008, 16), (64, 1024, 64)]
)
def test_the_cache_holds_all_requests_in_whole_blocks(
    tmp_path: Path, block_size: int | None, length: int, block: int
) -> None:
    """A quarter more for drafts in flight, and the block that vLLM keeps empty."""
    spec = spec_with(block_size=block_size)
    requests = 1536 * 8 * length
    expected = requests + requests // 4 + 1536 * block
    assert kv_cache_bytes(pair_of(tmp_path, TARGET), spec) == expected


def test_the_flag_sets_the_cache(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, TARGET)
    assert kv_cache_bytes(pair, spec_with(kv_cache_gib=2.5)) == 2_684_354_560


def free(monkeypatch: pytest.MonkeyPatch, available: int, where: str = "host") -> None:
    """So much is free on every rank's device, which is asked for as many ranks as will run."""
    monkeypatch.setattr(memory, "free_memory", lambda ranks: FreeMemory(available, where))


def with_weights(pair: ResolvedPair, size: int) -> ResolvedPair:
    for model in (pair.target, pair.draft):
        assert model is not None
        (Path(model) / "model.safetensors").write_bytes(b"x" * size)
    return pair


def expect_limit(
    monkeypatch: pytest.MonkeyPatch, pair: ResolvedPair, spec: RunSpec, needed: int, where: str
) -> None:
    free(monkeypatch, needed, where)
    require_memory(pair, spec)
    free(monkeypatch, needed - 1, where)
    with refused("kv_cache_memory_bytes", value=str(2**30)) as caught:
        require_memory(pair, spec)
    assert caught.value.exit_code == ExitCode.BAD_USAGE
    assert ("free on the GPU" in str(caught.value)) == (where == "gpu")


@pytest.mark.parametrize(
    ("where", "config_dtype", "flag", "times"),
    [
        # On a CPU bf16 files may be widened to float32.
        ("host", "float32", None, 2),
        ("gpu", "float32", None, 1),
        ("gpu", "bfloat16", "bfloat16", 1),
        ("gpu", "bfloat16", "float32", 2),
    ],
)
def test_weights_cache_and_runtime_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    where: str, config_dtype: str, flag: str | None, times: int,
) -> None:  # fmt: skip
    config = {**TARGET, "dtype": config_dtype}
    pair = with_weights(pair_of(tmp_path, config, config), 1000)
    needed = GIB + times * 2 * 1000 + RUNTIME_BYTES[where]
    expect_limit(monkeypatch, pair, spec_with(kv_cache_gib=1.0, dtype=flag), needed, where)


def test_every_rank_holds_its_share_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**TARGET, "dtype": "float32"}
    pair = with_weights(pair_of(tmp_path, config, config), 1001)
    spec = spec_with(kv_cache_gib=1.0, tensor_parallel_size=2)
    expect_limit(monkeypatch, pair, spec, GIB + 1001 + RUNTIME_BYTES["gpu"], "gpu")


@pytest.mark.parametrize("given", ['{"load_format": "dummy"}', None])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("scheme", "bits"), [(None, 16), ("fp8_per_tensor", 8), ("nvfp4_per_token", 4)]
)
def test_made_up_weights_take_what_the_shape_says_quantised_all_but_the_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    given: str | None, tied: bool, scheme: str | None, bits: int,
) -> None:  # fmt: skip
    config = {**TARGET, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 1000,
              "model_type": "llama", "tie_word_embeddings": tied}  # fmt: skip
    pair = pair_of(tmp_path, config, dtype="bfloat16", dummy=given is None)
    attention = 128 * (4 * 32) * 2 + 128 * (2 * 32) * 2
    layers, embeddings = 3 * (attention + 3 * 128 * 64), (1 if tied else 2) * 1000 * 128
    needed = GIB + layers * bits // 8 + 2 * embeddings + RUNTIME_BYTES["gpu"]
    arguments = {**json.loads(given or "{}"), **({"quantization": scheme} if scheme else {})}
    spec = spec_with(kv_cache_gib=1.0, engine_args=json.dumps(arguments))
    expect_limit(monkeypatch, pair, spec, needed, "gpu")


def test_without_the_flag_the_message_names_what_asks_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, GIB)
    with refused("--requests x --max-model-len", value="8 x 1000"):
        require_memory(pair_of(tmp_path, TARGET), spec_with())


def test_the_cpu_build_asks_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cpu_build", lambda: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12345))
    assert device.free_memory() == FreeMemory(12345, "host")


class Nvml:
    """Four GPUs; `broken` is a machine without a driver."""

    class NVMLError(Exception):
        """pynvml's error."""

    FREE = (40, 10, 30, 20)

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: len(self.FREE),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetUUID": lambda index: f"GPU-{'abcd'[index]}0",
            "nvmlDeviceGetMemoryInfo": lambda index: SimpleNamespace(free=self.FREE[index]),
        }[name]


@pytest.mark.parametrize(
    ("visible", "ranks", "free_bytes"),
    [
        (None, 1, 40),
        (None, 2, 10),  # the fullest of those that will be used
        ("2,3", 2, 20),
        ("3,0", 1, 20),
        ("GPU-c", 1, 30),
    ],
)
def test_the_gpus_that_will_be_used_are_asked(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ranks: int, free_bytes: int
) -> None:
    monkeypatch.setattr(device, "is_cpu_build", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.free_memory(ranks) == FreeMemory(free_bytes, "gpu")


def test_without_a_driver_the_host_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_cpu_build", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(broken=True))
    assert device.free_memory().where == "host"


@pytest.mark.parametrize("state_bytes", [2, 4])
def test_a_hybrids_recurrent_states_have_room_beside_its_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_bytes: int
) -> None:
    """Without it 7 of 8 requests ran at once on an H100, and the eighth waited for their blocks; on
    a CPU 2 of 4, as its states are float32."""
    monkeypatch.setattr(memory, "uses_gpu", lambda: state_bytes == 2)
    pair = resolve_pair("qwen3-next-mtp-shape", cache_dir=tmp_path)
    spec = spec_with(max_model_len=1024)
    # 36 layers, in three groups as large as the 13 with K/V (one drafts), x (4 + 1 tokens) x
    # (32 heads x 128 x 128 states of so many bytes, and 3 + 4 inputs of 8,192 channels x 2 bytes)
    slot = 32 * 128 * 128 * state_bytes + 7 * 8192 * 2
    states = 39 * 5 * slot
    row = 2 * 2 * 256 * 2  # K/V of one token in one layer; a block of it is as large as a slot
    block = {2: 640, 4: 1152}[state_bytes]
    assert (block - 128) * row < slot <= block * row
    per_request = 13 * row * -(-1024 // block) * block + states
    assert kv_cache_bytes(pair, spec) == int(per_request * 8 * HEADROOM) + 13 * row * block
    single = replace(spec, engine_args={"additional_config": {"nwor_state_slots": 1}})
    per_request -= states * 4 / 5
    assert kv_cache_bytes(pair, single) == int(per_request * 8 * HEADROOM) + 13 * row * block


def test_layers_without_a_cache_take_none(tmp_path: Path) -> None:
    """Nemotron-H: of 13 layers one attends, 6 are recurrent, 6 are MLPs."""
    pair = resolve_pair("nemotron-h-shape", cache_dir=tmp_path)
    config = json.loads((Path(pair.target) / "config.json").read_text())
    row = 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert cache_bytes_per_token(pair, spec_with()) == row
