"""Entries of a config.json under their usual names, checked, and the cache of each layer.

The rules for sliding windows are those by which Transformers, and vLLM with it, fills in
`layer_types`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from nwor_bench.errors import ConfigError

Config = Mapping[str, Any]

MODEL_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
"""Dtypes that a model computes in, and their size in bits."""

AUTO = "auto"
"""vLLM's cache dtype that follows the model and its checkpoint."""

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

_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_CACHE_NAMES = ("fp8", "nvfp4")

_ONE_KV_HEAD = ("falcon", "RefinedWeb", "RefinedWebModel", "gpt_bigcode")
"""Model types with one K/V head for all query heads, unless the config says otherwise."""


class ConfigReader:
    """Reads entries of one config.json, those of its `text_config` before its own; `field` and
    `source` name it in messages."""

    def __init__(self, config: Config, field: str = "", source: str = "") -> None:
        self.config: Config = text_entries(config)
        self.field = field
        self.source = source

    def refusal(self, remedy: str) -> ConfigError:
        return ConfigError.for_field(self.field, self.source, remedy)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of 1 or more; null counts as absent."""
        value = self.config.get(key)
        value = default if value is None else value
        if value is None:
            raise self.refusal(f'its config has no "{key}"; add it with the model\'s value')
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(f'its "{key}" is {value!r}; write a whole number, 1 or more')
        return value

    def whole(self, key: str) -> int:
        """A whole number; 0 if null or absent."""
        return self.number(key) if self.config.get(key) else 0

    def entries(self, key: str, kind: type) -> list[Any] | None:
        """A list of `kind`; None if null or absent."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.refusal(f'its "{key}" is {value!r}; write a list of {kind.__name__}')
        return value

    def dtype(self) -> str:
        """The dtype that the config names; without one vLLM reads the weights', mostly bfloat16."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16"
        name = str(value).removeprefix("torch.")
        if name not in MODEL_BITS:
            raise self.refusal(f'its "dtype" is {value!r}; write one of {", ".join(MODEL_BITS)}')
        return name


def text_entries(config: Config) -> dict[str, Any]:
    """The config, those of its `text_config` before its own, with each usual name that it lacks
    taken from another that it has."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    named = dict(config)
    for usual, others in _OTHER_NAMES.items():
        if named.get(usual) is None:
            present = (config[other] for other in others if config.get(other) is not None)
            value = next(present, None)
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


def chosen_cache_dtype(config: Mapping[str, Any], asked: str) -> str:
    """The cache dtype that was asked for; for `auto` the one that the checkpoint asks for."""
    return checkpoint_cache_dtype(config) if asked == AUTO else asked


def checkpoint_cache_dtype(config: Mapping[str, Any]) -> str:
    """`fp8` or `nvfp4` if the config.json asks for such a cache, else `auto`."""
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
    asked = next(
        (value for key in _CACHE_KEYS for place in places if (value := place.get(key))), None
    )
    if isinstance(asked, Mapping):
        return _of_scheme(asked)
    named = asked.lower() if isinstance(asked, str) else ""
    return named if named in _CACHE_NAMES else AUTO


def _of_scheme(scheme: Mapping[str, Any]) -> str:
    if scheme.get("type") != "float":
        return AUTO
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else AUTO


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
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ValueError(f"block_configs has {block!r}")
    return not attention.get("no_op") and not attention.get("replace_with_linear")


def _has_window(config: Config) -> bool:
    """True if the config has a window that is used."""
    asked = not str(config.get("model_type", "")).startswith(_WHEN_ASKED)
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", asked))


def slides(config: Config, place: int) -> bool:
    """True if layer `place` has the config's window. Raises ValueError for a strange entry."""
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
