"""Where the config.json of a named model is: a file, a folder, kept facts, the hub's cache."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.pairs.local import locate_model, read_config_file, read_model_config
from nwor_bench.models.support.recipes import kept_models
from nwor_bench.records.user_files import home_path

FIELD = "CONFIG_OR_MODEL"


@dataclass(frozen=True)
class FoundConfig:
    """A config.json's content, the model's name, and where it was found."""

    name: str
    config: dict[str, Any]
    origin: str


def find_config(named: str) -> FoundConfig:
    """The config of a config.json, a model folder, or a hub model that is kept or cached.

    Nothing is downloaded. Raises ConfigError.
    """
    path = home_path(named)
    if path.is_file():
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return FoundConfig(name, read_config_file(path, FIELD, named), str(path))
    located = locate_model(FIELD, named)
    config = read_model_config(located, FIELD)
    if config is not None:
        return FoundConfig(Path(located).name, config, located)
    for kept in kept_models():
        if kept.name.lower() == named.lower():
            return FoundConfig(kept.name, kept.config, kept.source)
    cached = cached_config(named)
    if cached is not None:
        return FoundConfig(named, read_config_file(cached, FIELD, named), str(cached))
    raise ConfigError.for_field(
        FIELD, named, "it is neither kept nor in the hub's cache; name its config.json or its "
        "folder, or see `nwor-bench supports --recipes` for what is kept",
    )  # fmt: skip


def cached_config(hub_name: str) -> Path | None:
    """config.json of the hub's cache, of the revision that `main` was; None if there is none."""
    home = os.environ.get("HF_HOME") or home_path("~/.cache/huggingface")
    root = home_path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    folder = root / f"models--{hub_name.replace('/', '--')}"
    try:
        revision = (folder / "refs/main").read_text(encoding="utf-8").strip()
    except OSError:
        revision = ""
    named = folder / "snapshots" / revision / "config.json"
    if revision and named.is_file():
        return named
    return next(iter(sorted(folder.glob("snapshots/*/config.json"))), None)
