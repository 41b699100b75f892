"""Kept facts of models that vLLM's recipes serve with a speculative method.

`recipes.json` has one model a line: its name, the recipe's method and draft tokens, the page that
the facts are from, and the entries of its config.json that staging depends on. Recipes whose config
could not be read are in the list `left_out`.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.config_reader import Kind
from nwor_bench.models.methods import Method
from nwor_bench.models.pairs.local import locate_model, read_config_file, read_model_config
from nwor_bench.models.support.facts import EngineFacts, ModelFacts, read_facts
from nwor_bench.models.support.predict import MethodSupport, method_support
from nwor_bench.records.files import home_path

FILE = Path(__file__).with_name("recipes.json")

FIELD = "CONFIG_OR_MODEL"


@dataclass(frozen=True)
class KeptModel:
    """One recipe model, with the entries of its config.json that are kept."""

    name: str
    method: Method
    draft_tokens: int
    source: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Covered:
    """A recipe model and the plugin's decision for its drafts."""

    kept: KeptModel
    model: ModelFacts
    found: MethodSupport

    @property
    def kind(self) -> str:
        """The model's class."""
        return class_of(self.model)


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def kept_models() -> tuple[KeptModel, ...]:
    """Every model of which facts are kept, in the file's order."""
    return tuple(
        KeptModel(
            name=entry["name"],
            method=Method(entry["method"]),
            draft_tokens=entry["draft_tokens"],
            source=entry["source"],
            config=entry["config"],
        )
        for entry in _content()["models"]
    )


def left_out() -> tuple[str, ...]:
    """Models with a recipe and a method whose config could not be read."""
    return tuple(_content()["left_out"])


def coverage(engine: EngineFacts) -> tuple[Covered, ...]:
    """Every kept model with its recipe's method and draft tokens, on this device."""
    rows = []
    for kept in kept_models():
        model = read_facts(kept.config, kept.name, "recipes.json", kept.name)
        own = EngineFacts(
            engine.device, kept.draft_tokens, engine.cache_dtype, engine.one_group, engine.eager
        )
        rows.append(Covered(kept, model, method_support(model, own, kept.method)))
    return tuple(rows)


def class_of(model: ModelFacts) -> str:
    """A model's class: `plain`, or the features of its layers."""
    layers = model.layers
    kinds = {layer.kind for layer in layers}
    marks = {
        "recurrent": bool(kinds & {Kind.RECURRENT, Kind.BOTH}),
        "sparse MLA": any(layer.sparse and layer.latent for layer in layers),
        "MLA": any(layer.latent and not layer.sparse for layer in layers),
        "sparse": any(layer.sparse and not layer.latent for layer in layers),
        "chunked": Kind.CHUNKED in kinds,
        "sinks": any(layer.sinks for layer in layers),
        "shared K/V": any(layer.shares_kv for layer in layers),
        "sliding + full": {Kind.SLIDING, Kind.FULL} <= kinds,
        "values of another size": any(layer.value_dim for layer in layers),
        "2 head sizes": len({layer.head_dim for layer in layers if layer.head_dim}) > 1,
        "image masks": model.images_see_themselves,
    }
    return ", ".join(name for name, holds in marks.items() if holds) or "plain"


@dataclass(frozen=True)
class FoundConfig:
    """A config.json's content, the model's name, and the place of the file."""

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
    from huggingface_hub import constants, try_to_load_from_cache

    cached = try_to_load_from_cache(named, "config.json", cache_dir=constants.HF_HUB_CACHE)
    if isinstance(cached, str):
        return FoundConfig(named, read_config_file(Path(cached), FIELD, named), cached)
    raise ConfigError.for_field(
        FIELD, named, "it is neither kept nor in the hub's cache; name its config.json or its "
        "folder, or see `nwor-bench supports --recipes` for the kept ones",
    )  # fmt: skip
