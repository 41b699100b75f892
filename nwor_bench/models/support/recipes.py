"""Kept facts of models that vLLM's recipes serve with a speculative method.

`recipes.json` has one model a line: its name, the recipe's method and draft tokens, the page that
the facts are from, and the entries of its config.json that staging asks about. A recipe whose
config could not be read is in the list `left_out`, with no facts.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nwor_bench.models.layer_kinds import Kind
from nwor_bench.models.support.engine import EngineFacts
from nwor_bench.models.support.facts import ModelFacts, read_facts
from nwor_bench.models.support.methods import Method, MethodSupport, method_support

FILE = Path(__file__).with_name("recipes.json")


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
    """A recipe model and what today's plugin would do with its drafts."""

    kept: KeptModel
    model: ModelFacts
    found: MethodSupport

    @property
    def kind(self) -> str:
        """What stands between the model and staging, in a few words."""
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
    """A model's class: `plain`, or all that sets its layers apart."""
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
