"""Is a local model's config.json one that transformers can read? Asked before anything starts."""

from pathlib import Path

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.pairs.local import read_model_config
from nwor_bench.models.pairs.model import ResolvedPair

_NEEDED = ("hidden_size", "num_hidden_layers")
"""Sizes for which transformers would take another model's where a config leaves them out."""


def check_model_configs(pair: ResolvedPair) -> None:
    """Read target and drafter's config.json as transformers does; hub names are left out.

    Raises ConfigError naming the pair, the file and transformers' reason.
    """
    for role, model in (("target", pair.target), ("drafter", pair.draft)):
        if model is not None and Path(model).is_dir():
            _check(f"pair {pair.name}: {role}", Path(model))


def _check(field: str, folder: Path) -> None:
    config = read_model_config(str(folder), field) or {}
    inner = config.get("text_config") or {}
    path = str(folder / "config.json")
    if config.get("model_type") in KNOWN_TYPES:
        for key in _NEEDED:
            if config.get(key) is None and inner.get(key) is None:
                raise ConfigError.for_field(
                    field, path, f'it has no "{key}"; add it with the model\'s value'
                )
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return  # vLLM knows some types that transformers does not; it is asked later
    try:
        AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # its validators raise errors of many kinds, of their own too
        raise refused_config(field, folder, error, "transformers") from error


def refused_config(field: str, folder: Path, error: Exception, who: str) -> ConfigError:
    """A config.json that `who` refuses: its reason in one line, and what to do."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError.for_field(
        field,
        str(folder / "config.json"),
        f"{who} refuses it ({reason}); correct that entry, or name another model",
    )
