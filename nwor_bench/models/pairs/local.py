"""Local model folders: locate them, read and check their config.json, write JSON files."""

import json
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.pairs.pair import ResolvedPair
from nwor_bench.records.json_text import parse_json
from nwor_bench.records.user_files import home_path, read_text

CONFIG = "config.json"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

_NEEDED = ("hidden_size", "num_hidden_layers")
"""Sizes that must be given: transformers would silently use another model's defaults."""


def locate_model(field: str, reference: str) -> str:
    """The absolute path of a local model folder, or the hub name unchanged.

    `field` names the option in messages. Raises ConfigError for a folder without a usable
    config.json, and for a reference that is neither a folder nor a possible hub name.
    """
    path = home_path(reference)
    if reference.strip() and path.is_dir():
        folder = str(path.resolve())
        read_model_config(folder, field)
        return folder
    if path.is_file():
        raise ConfigError.for_field(
            field, reference, "it is a file; name the folder that holds config.json"
        )
    if not _HUB_NAME.fullmatch(reference):
        raise ConfigError.for_field(
            field, reference, "no such folder; name a local model folder or a hub model (org/name)"
        )
    return reference


def read_model_config(target: str, field: str = "model") -> dict[str, Any] | None:
    """config.json of a local model folder as a dict; None for a hub name.

    Raises ConfigError if config.json is missing, or it or its text_config is not a JSON object.
    """
    folder = home_path(target)
    if not folder.is_dir():
        return None
    missing = "the folder holds no config.json; name a folder saved by transformers"
    return read_config_file(folder / CONFIG, field, target, missing)


def read_config_file(
    path: Path,
    field: str,
    named: str,
    missing: str = "there is no such file; name a model's config.json",
) -> dict[str, Any]:
    """A config.json as a dict; `field` and `named` are the option and its value in messages.

    Raises ConfigError if it cannot be read, or it or its text_config is not a JSON object.
    """
    try:
        config = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise ConfigError.for_field(field, named, missing) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = f"its config cannot be read as JSON ({reason}); name another config.json"
        raise ConfigError.for_field(field, named, remedy) from error
    if not isinstance(config, dict):
        remedy = "its config is not a JSON object; name a model's config.json"
        raise ConfigError.for_field(field, named, remedy)
    if not isinstance(config.get("text_config") or {}, dict):
        remedy = 'the "text_config" of its config is not an object; correct it'
        raise ConfigError.for_field(field, named, remedy)
    return config


def check_model_configs(pair: ResolvedPair) -> None:
    """Read target's and drafter's config.json as transformers does; hub models are skipped.

    Raises ConfigError with the pair, the file and transformers' reason.
    """
    for role, model in (("target", pair.target), ("drafter", pair.draft)):
        if model is not None and Path(model).is_dir():
            _check(f"pair {pair.name}: {role}", Path(model))


def _check(field: str, folder: Path) -> None:
    config = read_model_config(str(folder), field) or {}
    inner = config.get("text_config") or {}
    path = str(folder / CONFIG)
    if (folder / CONFIG).read_bytes().startswith(BOM_UTF8):
        remedy = "it begins with a byte order mark, at which transformers fails; save it without"
        raise ConfigError.for_field(field, path, remedy)
    if config.get("model_type") in KNOWN_TYPES:
        for key in _NEEDED:
            if config.get(key) is None and inner.get(key) is None:
                raise ConfigError.for_field(
                    field, path, f'it has no "{key}"; add it with the model\'s value'
                )
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return  # vLLM knows types that transformers does not; vLLM checks these later
    try:
        AutoConfig.from_pretrained(str(folder))
    except Exception as error:  # its validators raise many types of errors
        raise refused_config(field, folder, error, "transformers") from error


def refused_config(field: str, folder: Path, error: Exception, who: str) -> ConfigError:
    """Error for a config.json that `who` refuses, with the reason in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError.for_field(
        field,
        str(folder / "config.json"),
        f"{who} refuses it ({reason}); correct that entry, or name another model",
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
