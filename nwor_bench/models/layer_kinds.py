"""The cache of each layer of a decoder, from its config.json or, if that lists none, its family.

The rules for sliding windows are those by which Transformers, and vLLM with it, fills in
`layer_types`. Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from nwor_bench.models.config_reader import Config

FULL_EVERY = 4
"""Qwen3-Next's full attention, if its config does not say: every fourth layer."""


class Kind(StrEnum):
    """State that a layer keeps between steps."""

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

_SLIDING_FULL_EVERY = {
    **{"afmoe": 4, "cohere2": 4, "cohere2_moe": 4, "exaone4": 4, "exaone_moe": 4, "olmo3": 4},
    **{"gemma3": 6, "gemma3_text": 6, "gemma3n": 5, "gemma3n_text": 5, "gemma4": 6},
    "gemma4_text": 6,
}
"""Every n-th layer sees all of a request, if the config does not say."""

_EVERY_KEYS = ("sliding_window_pattern", "global_attn_every_n_layers")

_FULL_FIRST_OF = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4}
"""The first of n layers sees all of a request."""

_TURNS = ("gemma2", "gpt_oss", "step3p5", "vaultgemma")
"""Model types in which every other layer slides, the first of all among them."""

_WHEN_ASKED = ("qwen2", "qwen3", "smollm3")
"""Beginnings of the model types whose `use_sliding_window` defaults to false."""

_MAX_WINDOW_LAYERS = 28

_ALL_RECURRENT = ("mamba", "mamba2", "falcon_mamba")
_BOTH = ("falcon_h1",)


def listed_kinds(config: Config) -> tuple[Kind, ...] | None:
    """A kind for every layer, if the config lists them; None otherwise.

    Raises ValueError with an unknown word.
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


def kinds_of(text: Config) -> tuple[Kind, ...]:
    """The kind of every layer. Raises ValueError or KeyError if unknown."""
    listed = listed_kinds(text)
    if listed is not None:
        return listed
    count = text["num_hidden_layers"]
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count <= 10_000:
        raise ValueError(f"num_hidden_layers is {count!r}")
    family = str(text.get("model_type", ""))
    blocks = text.get("block_configs")  # Nemotron-NAS
    if isinstance(blocks, list) and len(blocks) == count:
        return tuple(Kind.FULL if _attends(block) else Kind.NOTHING for block in blocks)
    if family in _ALL_RECURRENT:
        return (Kind.RECURRENT,) * count
    if family in _BOTH:
        return (Kind.BOTH,) * count
    if text.get("linear_num_key_heads"):
        return every_nth(count, int(text.get("full_attention_interval") or FULL_EVERY))
    if text.get("attn_layer_period"):  # Jamba
        period, offset = int(text["attn_layer_period"]), int(text.get("attn_layer_offset") or 0)
        return tuple(Kind.RECURRENT if n % period != offset else Kind.FULL for n in range(count))
    if text.get("attn_layer_indices"):  # Bamba
        full = set(text["attn_layer_indices"])
        return tuple(Kind.FULL if n in full else Kind.RECURRENT for n in range(count))
    if text.get("hybrid_layer_pattern"):  # MiMo V2
        return tuple(Kind.SLIDING if mark else Kind.FULL for mark in text["hybrid_layer_pattern"])
    if text.get("attention_chunk_size") and family.startswith("llama4"):
        return _chunked(text, count)
    return tuple(Kind.SLIDING if slides(text, n) else Kind.FULL for n in range(count))


def _chunked(text: Config, count: int) -> tuple[Kind, ...]:
    """Llama 4: layers with positions see one chunk, every fourth sees all of a request."""
    marks = text.get("no_rope_layers")
    if not marks:
        step = int(text.get("no_rope_layer_interval") or 4)
        marks = [int((n + 1) % step != 0) for n in range(count)]
    return tuple(Kind.CHUNKED if mark else Kind.FULL for mark in marks)


def _attends(block: Any) -> bool:
    own = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(own, Mapping):
        raise ValueError(f"block_configs has {block!r}")
    return not own.get("no_op") and not own.get("replace_with_linear")


def _has_window(config: Config) -> bool:
    """Whether the config has a window that is used."""
    asked = not str(config.get("model_type", "")).startswith(_WHEN_ASKED)
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", asked))


def slides(config: Config, place: int) -> bool:
    """Whether layer `place` has the config's window. Raises ValueError for a strange entry."""
    if not _has_window(config):
        return False
    family = str(config.get("model_type", ""))
    if family in _SLIDING_FULL_EVERY:
        last = family.startswith("gemma4") and place + 1 == config.get("num_hidden_layers")
        return (place + 1) % _every(config, _SLIDING_FULL_EVERY[family]) != 0 and not last
    if family in _FULL_FIRST_OF:
        return place % _FULL_FIRST_OF[family] != 0
    if family in _TURNS:
        return place % 2 == 0
    if family.startswith("qwen"):
        return place >= _first_window_layer(config)
    return not config.get("compress_ratios")


def _first_window_layer(config: Config) -> int:
    first = config.get("max_window_layers", _MAX_WINDOW_LAYERS) or 0
    if not isinstance(first, int):
        raise ValueError(f'"max_window_layers" is {first!r}')
    return first


def _every(config: Config, usual: int) -> int:
    for key in _EVERY_KEYS:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'"{key}" is {value!r}')
        return value
    return usual
