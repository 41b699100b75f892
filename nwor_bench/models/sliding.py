"""Which layers have a sliding window, where a config.json has no list of its layers. Pure.

The rules are those by which Transformers fills in `layer_types`, and vLLM with it.
"""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

_FULL_EVERY = {
    **{"afmoe": 4, "cohere2": 4, "cohere2_moe": 4, "exaone4": 4, "exaone_moe": 4, "olmo3": 4},
    **{"gemma3": 6, "gemma3_text": 6, "gemma3n": 5, "gemma3n_text": 5, "gemma4": 6},
    "gemma4_text": 6,
}
"""After so many layers one sees all of a request, where the config does not say."""

_EVERY_KEYS = ("sliding_window_pattern", "global_attn_every_n_layers")

_FULL_FIRST_OF = {"cwm": 4, "granite_swa": 4, "granitemoe_swa": 4}
"""The first of so many layers sees all of a request."""

_TURNS = ("gemma2", "gpt_oss", "step3p5", "vaultgemma")
"""Model types in which every other layer slides, the first of all among them."""

_WHEN_ASKED = ("qwen2", "qwen3", "smollm3")
"""Beginnings of the model types whose `use_sliding_window` is false where it is absent."""

_MAX_WINDOW_LAYERS = 28


def _has_window(config: Config) -> bool:
    """Whether the config has a window that is used."""
    asked = not str(config.get("model_type", "")).startswith(_WHEN_ASKED)
    return bool(config.get("sliding_window")) and bool(config.get("use_sliding_window", asked))


def slides(config: Config, place: int) -> bool:
    """Whether layer `place` has the config's window. Raises ValueError for a strange entry."""
    if not _has_window(config):
        return False
    family = str(config.get("model_type", ""))
    if family in _FULL_EVERY:
        last = family.startswith("gemma4") and place + 1 == config.get("num_hidden_layers")
        return (place + 1) % _every(config, _FULL_EVERY[family]) != 0 and not last
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
