"""Entries of a config.json under their usual names, wherever and however it has them. Pure."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_OTHER_NAMES = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": (
        *("n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    ),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
}
"""BLOOM's, GPT-2's, GPT-J's, Falcon's, OPT's, ChatGLM's, DBRX's, EXAONE's, Step's."""

_ONE_KV_HEAD = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
"""Model types with one K/V head for all query heads, unless the config says otherwise."""


def text_entries(config: Config) -> dict[str, Any]:
    """The config, those of its `text_config` before its own, with each usual name that it lacks
    taken from another that it has."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    named = dict(config)
    for usual, others in _OTHER_NAMES.items():
        if named.get(usual) is None:
            found = (config[other] for other in others if config.get(other) is not None)
            value = next(found, None)
            if value is not None:
                named[usual] = value
    layers = config.get("num_layers")
    if str(config.get("model_type", "")).startswith("longcat_flash") and isinstance(layers, int):
        named["num_hidden_layers"] = 2 * layers  # each has two attentions
    heads = _kv_heads(config)
    return named if heads is None else {**named, "num_key_value_heads": heads}


def _kv_heads(config: Config) -> Any:
    """K/V heads by a rule of the family; None without one."""
    family, attention = config.get("model_type"), config.get("attn_config")
    if family == "dbrx" and isinstance(attention, Mapping):
        return attention.get("kv_n_heads")
    grouped = family != "gpt_bigcode" and config.get("new_decoder_architecture")
    asked = config.get("multi_query", True)
    return 1 if family in _ONE_KV_HEAD and asked and not grouped else None
