"""Attention in a config.json: heads, latent rows, indexers."""

from collections.abc import Mapping
from typing import Any

from nwor_bench.models.config_reader import ConfigReader
from nwor_bench.models.shape import Heads, Indexer, Mla

_SPARSE_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose attention reads a selected part of the context, and is covered."""

_EXPANDED = ("minicpm3",)
"""Model types of latent attention whose K and V vLLM expands before it caches them."""


def has_latent_rows(config: Mapping[str, Any]) -> bool:
    """Whether the cache has one latent row a token, not K and V of heads."""
    return config.get("kv_lora_rank") is not None and config.get("model_type") not in _EXPANDED


def read_heads(reader: ConfigReader) -> tuple[int, int]:
    """Query and K/V heads of layers that have no others."""
    heads = reader.number("num_attention_heads")
    return heads, reader.number("num_key_value_heads", heads)


def check_heads(reader: ConfigReader) -> None:
    """Refuse query heads that cannot share the K/V heads evenly."""
    heads, kv_heads = read_heads(reader)
    if heads % kv_heads and not has_latent_rows(reader.config):
        raise reader.refusal(
            f'its "num_key_value_heads" is {kv_heads}; write a divisor of the {heads} '
            '"num_attention_heads"'
        )


def read_head_dim(reader: ConfigReader, heads: int) -> int:
    """Size of a query and of a key."""
    default = None
    if reader.config.get("head_dim") is None:
        default = reader.whole("attention_head_dim") or reader.number("hidden_size") // heads
    return reader.number("head_dim", default)


def read_value_dim(reader: ConfigReader) -> int | None:
    """Size of a value; None if it is that of a key."""
    return reader.whole("v_head_dim") or None


def read_layer_heads(reader: ConfigReader, *, slides: bool) -> Heads:
    """Heads of the layers that slide, or of the others."""
    own = read_own_heads(reader, slides=slides)
    if own is not None:
        return own
    heads, kv_heads = read_heads(reader)
    dim = read_head_dim(reader, heads)
    return Heads(heads, kv_heads, dim, read_value_dim(reader) or dim)


def read_own_heads(reader: ConfigReader, *, slides: bool) -> Heads | None:
    """Heads of sliding layers (MiMo V2), or of the others (Gemma 4), that have their own; of all
    layers if K and V are expanded from latent rows, with values padded to the size of keys."""
    heads, kv_heads = read_heads(reader)
    if reader.config.get("model_type") in _EXPANDED:
        dim = reader.number("qk_nope_head_dim") + reader.number("qk_rope_head_dim")
        return Heads(heads, heads, dim, dim)
    dim = read_head_dim(reader, heads)
    if slides and reader.config.get("swa_num_key_value_heads"):
        dim = reader.number("swa_head_dim", dim)
        return Heads(
            reader.number("swa_num_attention_heads", heads),
            reader.number("swa_num_key_value_heads"),
            dim,
            reader.number("swa_v_head_dim", dim),
        )
    if not slides and str(reader.config.get("model_type", "")).startswith("gemma4"):
        dim = reader.number("global_head_dim", 512)
        if reader.config.get("attention_k_eq_v"):  # else it has the others' K/V heads
            kv_heads = reader.number("num_global_key_value_heads", kv_heads)
        return Heads(heads, kv_heads, dim, dim)
    return None


def read_latent_row(reader: ConfigReader, *, slides: bool) -> int | None:
    """Elements of a cached latent row; sliding layers may have their own (dots3). None without."""
    if not has_latent_rows(reader.config):
        return None
    of = "swa_" if slides and reader.config.get("swa_kv_lora_rank") else ""
    return reader.number(f"{of}kv_lora_rank") + reader.whole(f"{of}qk_rope_head_dim")


def most_cached_elements(reader: ConfigReader) -> int:
    """Cache elements of one token in the layer that has most, an indexer's keys included."""
    kinds = (True, False)
    rows = [read_latent_row(reader, slides=slides) or 0 for slides in kinds]
    if any(rows):
        return max(rows) + reader.whole("index_head_dim")
    return max(read_layer_heads(reader, slides=slides).cache_elements(1) for slides in kinds)


def read_mla(reader: ConfigReader) -> Mla | None:
    """Latent attention; None if K and V are cached."""
    if not has_latent_rows(reader.config):
        return None
    return Mla(
        q_rank=reader.whole("q_lora_rank") or None,
        kv_rank=reader.number("kv_lora_rank"),
        rope_dim=reader.number("qk_rope_head_dim"),
        nope_dim=reader.number("qk_nope_head_dim"),
        v_dim=reader.number("v_head_dim"),
    )


def read_indexer(reader: ConfigReader, family: str) -> Indexer | None:
    """Of sparse latent attention; with `index_topk_freq` some layers have none of their own."""
    selected = reader.whole("index_topk")
    if not selected:
        return None
    if family not in _SPARSE_TYPES or not has_latent_rows(reader.config):
        raise reader.refusal(
            "its attention reads a selected part of the context (index_topk); name a decoder "
            "with a plain KV cache"
        )
    layers = range(reader.number("num_hidden_layers"))
    pattern = reader.config.get("index_topk_pattern")
    every, first = reader.number("index_topk_freq", 1), reader.whole("index_skip_topk_offset") or 2
    if pattern is None:
        own = [layer for layer in layers if max(layer - first + 1, 0) % every == 0]
    else:
        own = [n for n in layers if n >= len(pattern) or pattern[n] != "S"]
    heads, head_dim = reader.number("index_n_heads"), reader.number("index_head_dim")
    return Indexer(heads, head_dim, selected, len(own))
