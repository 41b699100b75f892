"""The cache that a quantised checkpoint asks for, and vLLM's own answer to the same configs."""

from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.models.config_reader import checkpoint_cache_dtype

EIGHT = {"num_bits": 8, "type": "float", "dynamic": False}

CONFIGS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "auto"),
    ({"quant_method": "fp8"}, "auto"),
    ({"quant_method": "modelopt"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "auto"),
    ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_scheme": EIGHT}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**EIGHT, "dynamic": True}}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**EIGHT, "num_bits": 4}}, "nvfp4"),
]
SCHEME = {"quant_method": "compressed-tensors", "kv_cache_scheme": EIGHT}


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [*CONFIGS, (SCHEME, "fp8"), ({**SCHEME, "kv_cache_scheme": None}, "auto")],
)
def test_the_checkpoint_says_what_auto_is(quantised: dict[str, Any] | None, expected: str) -> None:
    assert checkpoint_cache_dtype({"quantization_config": quantised}) == expected


@pytest.mark.slow  # imports vLLM
def test_vllm_says_the_same() -> None:
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    for quantised, expected in CONFIGS:
        model: Any = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=quantised))
        theirs = resolve_kv_cache_dtype_string("auto", model)
        assert theirs.removesuffix("_e4m3") == expected
