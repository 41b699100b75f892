"""How much memory a sweep needs, and is it there? Asked before an engine starts."""

from pathlib import Path
from typing import Any

from nwor_bench.config import SweepSpec
from nwor_bench.errors import ConfigError
from nwor_bench.pairs import ResolvedPair, read_model_config

GIB = 1 << 30
HEADROOM = 1.25
"""Room beside the requests' own tokens: block rounding and drafts in flight."""

UNKNOWN_MODEL_CACHE = 1 * GIB
"""Cache for a hub model whose config.json is not at hand yet."""

RUNTIME_BYTES = int(1.5 * GIB)
"""What vLLM, torch and activations take beside weights and cache on a CPU."""


def kv_cache_bytes(pair: ResolvedPair, spec: SweepSpec) -> int:
    """Bytes of KV cache: `--kv-cache-gib`, or enough for all requests at full length."""
    if spec.kv_cache_gib is not None:
        return int(spec.kv_cache_gib * GIB)
    per_token = cache_bytes_per_token(pair)
    if per_token is None:
        return UNKNOWN_MODEL_CACHE
    block = spec.block_size or 128
    length = -(-spec.scenario.max_model_len // block) * block
    return int(per_token * spec.scenario.requests * length * HEADROOM)


def cache_bytes_per_token(pair: ResolvedPair) -> int | None:
    """K and V of one token over all layers of target and drafter; None for a hub model,
    and for a config.json that names its sizes otherwise.

    2 x layers x kv heads x head dim x bytes an element, at 4 bytes (float32) to be safe.
    """
    total = 0
    for model in (pair.target, pair.draft):
        if model is None:
            continue
        elements = _cache_elements(read_model_config(model) or {})
        if elements == 0:
            return None
        total += elements * 4
    return total


def _cache_elements(config: dict[str, Any]) -> int:
    config = config.get("text_config") or config
    layers = config.get("num_hidden_layers", 0)
    heads = config.get("num_attention_heads", 1)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return int(2 * layers * kv_heads * head_dim)


def require_memory(pair: ResolvedPair, spec: SweepSpec) -> None:
    """Raises ConfigError if cache and weights will not fit into the free memory."""
    import psutil

    cache = kv_cache_bytes(pair, spec)
    needed = cache + _weight_bytes(pair) + RUNTIME_BYTES
    free = psutil.virtual_memory().available
    if needed > free:
        if spec.kv_cache_gib is not None:
            field, value = "--kv-cache-gib", f"{spec.kv_cache_gib:g}"
        else:
            field = "--requests x --max-model-len"
            value = f"{spec.scenario.requests} x {spec.scenario.max_model_len}"
        raise ConfigError.for_field(
            field,
            value,
            f"no free memory for the cache: {needed / GIB:.1f} GiB needed with the weights, "
            f"{free / GIB:.1f} GiB free; write a smaller --kv-cache-gib, fewer --requests or a "
            "shorter --max-model-len",
        )


def _weight_bytes(pair: ResolvedPair) -> int:
    """Size of the local weight files, taken up twice as bf16 may be widened to float32."""
    folders = [Path(model) for model in (pair.target, pair.draft) if model]
    files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.safetensors")]
    return 2 * sum(file.stat().st_size for file in files)
