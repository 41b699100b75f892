"""Kept facts of models that vLLM's recipes serve with a speculative method, and their predictions.

`data/recipes.json` has one model a line: its name, the recipe's method and draft tokens, the page
that the facts are from, and the entries of its config.json that staging depends on. Recipes whose
config could not be read are in the list `left_out`.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.models.config_reader import Kind
from nwor_bench.models.methods import Method
from nwor_bench.models.support.facts import EngineFacts, ModelFacts, read_facts
from nwor_bench.models.support.predict import MethodSupport, Outcome, method_support
from nwor_bench.report.support import WORDS

CONTENT: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data/recipes.json").read_text(encoding="utf-8")
)
LEFT_OUT: list[str] = CONTENT["left_out"]


@dataclass(frozen=True)
class Recipe:
    """A recipe model, and the prediction with the recipe's method on a Hopper GPU."""

    name: str
    draft_tokens: int
    source: str
    kind: str
    found: MethodSupport


def recipes() -> list[Recipe]:
    """Every model of which facts are kept, in the file's order."""
    rows = []
    for entry in CONTENT["models"]:
        model = read_facts(entry["config"], entry["name"], "recipes.json", entry["name"])
        engine = EngineFacts(draft_tokens=entry["draft_tokens"])
        found = method_support(model, engine, Method(entry["method"]))
        rows.append(
            Recipe(entry["name"], engine.draft_tokens, entry["source"], _class_of(model), found)
        )
    return rows


def recipe_table() -> str:
    """The Markdown table of docs/support.md."""
    rows = recipes()
    counts = Counter(row.found.outcome for row in rows)
    models: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        why = f": `{row.found.reason}`" if row.found.reason else ""
        group = (row.kind, WORDS[row.found.outcome] + why)
        models.setdefault(group, []).append(f"[{row.name}]({row.source})")
    lines = [("Layers", "Drafts", "Models"), ("---",) * 3]
    lines += [(*group, ", ".join(links)) for group, links in models.items()]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"Of {len(rows)} recipe models with a speculative method {counts[Outcome.STAGED]} would be "
        f"staged, {counts[Outcome.DIRECT]} written directly, {counts[Outcome.REFUSED]} refused by "
        f"vLLM; the config.json of {len(LEFT_OUT)} more could not be read.\n\n{grid}\n\n"
        f"Left out: {', '.join(LEFT_OUT)}."
    )


def _class_of(model: ModelFacts) -> str:
    """`plain`, or the features of its layers."""
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
