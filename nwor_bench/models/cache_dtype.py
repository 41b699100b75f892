"""What vLLM makes of the cache dtype `auto` for a quantised model. Pure.

As vLLM 0.32 does (`resolve_kv_cache_dtype_string`, and `Attention` for compressed-tensors).
"""

from collections.abc import Mapping
from typing import Any

AUTO = "auto"

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_NAMED = ("fp8", "nvfp4")


def chosen_cache_dtype(config: Mapping[str, Any], asked: str) -> str:
    """The cache dtype that was asked for; for `auto` the one that the checkpoint asks for."""
    return checkpoint_cache_dtype(config) if asked == AUTO else asked


def checkpoint_cache_dtype(config: Mapping[str, Any]) -> str:
    """`fp8` or `nvfp4` where the config.json asks for such a cache, else `auto`."""
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        return AUTO
    method = str(quantised.get("quant_method", ""))
    if method == "compressed-tensors":
        return AUTO if quantised.get("kv_cache_scheme") is None else "fp8"
    if not method.startswith("modelopt"):
        return AUTO
    inner = quantised.get("quantization")
    places = (inner if isinstance(inner, Mapping) else quantised, quantised)
    asked = next((found for key in _KEYS for place in places if (found := place.get(key))), None)
    if isinstance(asked, Mapping):
        return _of_scheme(asked)
    named = asked.lower() if isinstance(asked, str) else ""
    return named if named in _NAMED else AUTO


def _of_scheme(scheme: Mapping[str, Any]) -> str:
    if scheme.get("type") != "float":
        return AUTO
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else AUTO
