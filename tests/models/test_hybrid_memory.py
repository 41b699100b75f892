"""Reserved memory of hybrids against vLLM's own cache specs, made from the same config.json."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nwor_bench.models.byte_model import (
    MEMORY_SHARE,
    ByteModel,
    Workload,
    cache_block,
    padded_page,
    requests_that_fit,
    reserved_states,
)
from nwor_bench.models.config_json import read_shape
from nwor_bench.models.pairs.tiny import write_byte_tokenizer

H200 = 139 << 30
CHECKOUT = Path(__file__).parents[2]


def config_of(name: str, folder: Path) -> dict[str, Any]:
    """A shipped pair's target, or a tiny model of a family of tests/live_engine/tiny_hybrids.py."""
    if not name.endswith("-shape"):
        from tiny_hybrids import hybrid_pair  # imports vLLM

        dtype = "float32" if name == "Nemotron-H" else "bfloat16"
        hybrid_pair(folder, name, dtype)
        made: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return {**made, "dtype": dtype}
    text = (CHECKOUT / f"scenarios/pairs/{name}.toml").read_text(encoding="utf-8")
    config: dict[str, Any] = tomllib.loads(text)["shape"]["target"]
    return config


def vllm_config_of(config: dict[str, Any], folder: Path, drafts: int, kept: str) -> Any:
    """vLLM's configuration, with the cache's pages as for FlashAttention on a GPU.

    Its CPU platform has pages of its own and forces the states' type.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

    (folder / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(folder)
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
    found = EngineArgs(
        model=str(folder), load_format="dummy", max_model_len=1024, dtype=config["dtype"],
        speculative_config=ngram, enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip
    cache = found.cache_config
    cache.block_size, cache.mamba_page_size_padded, cache.mamba_ssm_cache_dtype = 16, None, kept
    align: Any = Platform._align_hybrid_block_size
    align.__func__(type(current_platform), found, FlashAttentionBackend)
    return found


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize(
    ("name", "kept"),
    [("qwen3-next-shape", "auto"), ("kimi-linear-shape", "auto"), ("nemotron-h-shape", "float32"),
     ("Nemotron-H", "float32"), ("Qwen3-Next", "auto")],
)  # fmt: skip
def test_pages_and_slots_are_vllms(name: str, kept: str, tmp_path: Path) -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.kv_cache_interface import MambaSpec

    config, drafts = config_of(name, tmp_path), 3
    vllm = vllm_config_of(config, tmp_path, drafts, kept)
    of_model, _ = ModelRegistry.resolve_model_cls(
        vllm.model_config.architecture, model_config=vllm.model_config
    )
    spec = MambaSpec(
        shapes=of_model.get_mamba_state_shape_from_config(vllm),
        dtypes=of_model.get_mamba_state_dtype_from_config(vllm),
        block_size=2048,
        page_size_padded=vllm.cache_config.mamba_page_size_padded,
        num_speculative_blocks=drafts,
    )
    shape = read_shape(config, "--config", name)
    bits = {"float32": 32, "bfloat16": 16}[shape.dtype]
    model, load = ByteModel(shape, bits, bits, bits), Workload(8, 1024, drafts, 0.5)
    states = shape.recurrent
    assert states is not None
    assert states.page_bytes(drafts) == spec.real_page_size_bytes
    assert cache_block(model, states, load) == vllm.cache_config.block_size
    assert padded_page(model, states, load) == spec.page_size_bytes
    reserved = states.count * spec.max_memory_usage_bytes(vllm)
    assert reserved_states(model, states, load, drafts + 1) == reserved
    assert type(vllm.cache_config)().gpu_memory_utilization == MEMORY_SHARE


def test_requests_that_fit_fill_the_memory_by_hand() -> None:
    """Qwen3.5-27B, float32 states: pages of 816 tokens; context and window, 1,635, take three."""
    config = json.loads((CHECKOUT / "tests/data/configs/Qwen3.5-27B.json").read_text())
    shape = read_shape(config, "--config", "m")
    model, load = ByteModel(shape, 16, 16, 16), Workload(8, 1630, 4, 0.5)
    states = shape.recurrent
    assert states is not None
    page = 816 * 2 * 4 * 256 * 2
    assert page - 16 * 4096 < 48 * 128 * 128 * 4 + 7 * 10240 * 2 <= page
    ring = 48 * 16 * (48 * (128 + 1) * 4 + 16 * 128 * 2)  # u and g of 48 heads, k of 16
    for slots, rings in ((5, 0), (1, ring)):
        request = 48 * slots * page + 16 * 3 * page + rings
        free = H200 * 0.92 - shape.parameters() * 2
        fit = requests_that_fit(H200, model, load, slots)
        assert fit * request <= free < (fit + 1) * request
        assert requests_that_fit(10**10, model, load, slots) == 0
