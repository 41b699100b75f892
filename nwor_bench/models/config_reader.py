"""Entries of a config.json under their usual names, checked; missing ones are refused by name."""

from collections.abc import Mapping
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
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
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
        (found for key in _CACHE_KEYS for place in places if (found := place.get(key))), None
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
