"""Model references: a local folder with a config.json, or a hub name that vLLM fetches itself."""

import re
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.records.json_text import parse_json

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def locate_model(field: str, reference: str) -> str:
    """The absolute path of a local model folder, or the hub name unchanged.

    `field` names the option in messages. Raises ConfigError for a folder without a usable
    config.json, for a path where there is no folder, and for what cannot be a hub name.
    """
    path = Path(reference).expanduser()
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

    Raises ConfigError when the folder's config.json is missing or is not a JSON object, or a
    text model inside it is none.
    """
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return None
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError.for_field(
            field, target, "the folder holds no config.json; name a folder saved by transformers"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError.for_field(
            field, target, f"its config.json cannot be read ({error}); save the model again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError.for_field(
            field, target, "its config.json is not a JSON object; save the model again"
        )
    if not isinstance(config.get("text_config") or {}, dict):
        raise ConfigError.for_field(
            field, target, 'the "text_config" of its config.json is not an object; correct it'
        )
    return config
