"""What each layer of a decoder keeps, by what its config.json says. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Config = Mapping[str, Any]


class Kind(StrEnum):
    """What a layer keeps between steps."""

    FULL = "full attention"
    SLIDING = "sliding attention"
    CHUNKED = "chunked attention"
    RECURRENT = "recurrent"
    BOTH = "attention and recurrent"
    NOTHING = "no cache"


_WORDS = {
    "full_attention": Kind.FULL,
    "full_attention_sparse": Kind.FULL,
    "attention": Kind.FULL,
    "global": Kind.FULL,
    "deepseek_sparse_attention": Kind.FULL,
    "minimax_m3_sparse": Kind.FULL,
    "compressed_sparse_attention": Kind.FULL,
    "heavily_compressed_attention": Kind.FULL,
    "sliding_attention": Kind.SLIDING,
    "local": Kind.SLIDING,
    "chunked_attention": Kind.CHUNKED,
    "linear_attention": Kind.RECURRENT,
    "recurrent": Kind.RECURRENT,
    "mamba": Kind.RECURRENT,
    "conv": Kind.RECURRENT,
    "hybrid": Kind.BOTH,
    "moe": Kind.NOTHING,
    "mlp": Kind.NOTHING,
}
"""Words of `layer_types` and `layers_block_type`."""

_LETTERS = {"M": Kind.RECURRENT, "*": Kind.FULL, "-": Kind.NOTHING, "E": Kind.NOTHING}
"""Nemotron-H's `hybrid_override_pattern`: Mamba2, attention, MLP, experts."""

_LISTS = ("layer_types", "layers_block_type")


def listed_kinds(config: Config) -> tuple[Kind, ...] | None:
    """A kind for every layer, where the config lists them; None if it does not.

    Raises ValueError with the word that it does not know.
    """
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:
        return tuple(_known(_LETTERS, letter) for letter in pattern)
    for key in _LISTS:
        words = config.get(key)
        if isinstance(words, list | tuple) and words:
            return tuple(_known(_WORDS, str(word)) for word in words)
    linear = config.get("linear_attn_config")
    if isinstance(linear, Mapping) and linear.get("full_attn_layers") is not None:
        return _by_number(linear, config.get("num_hidden_layers"))
    return None


def recurrent_word(config: Config) -> str:
    """The config's own word for its recurrent layers."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and "M" in pattern:
        return "M"
    for word in (str(word) for key in _LISTS for word in config.get(key) or ()):
        if _WORDS.get(word) in (Kind.RECURRENT, Kind.BOTH):
            return word
    return "linear_attention"


def _by_number(linear: Config, layers: Any) -> tuple[Kind, ...]:
    """Kimi's lists of layer numbers, from 1."""
    if not isinstance(linear["full_attn_layers"], list):
        raise ValueError(linear["full_attn_layers"])
    full = set(linear["full_attn_layers"])
    count = layers if isinstance(layers, int) else len(full) + len(linear.get("kda_layers", ()))
    first = int(linear.get("kda_layer_index_base", 1))
    return tuple(
        Kind.FULL if place in full else Kind.RECURRENT for place in range(first, count + first)
    )


def _known(words: Mapping[str, Kind], word: str) -> Kind:
    if word not in words:
        raise ValueError(word)
    return words[word]


def every_nth(count: int, interval: int) -> tuple[Kind, ...]:
    """Full attention in every `interval`-th layer, recurrent in the others."""
    return tuple(Kind.RECURRENT if (place + 1) % interval else Kind.FULL for place in range(count))
