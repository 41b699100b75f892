"""Prediction of what the plugin would do with a model's drafts, in sentences and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from nwor_bench.models.config_reader import Kind
from nwor_bench.models.support.facts import LayerFacts
from nwor_bench.models.support.predict import LayerGroup, MethodSupport, Outcome, Part, Support
from nwor_bench.records.fallback_reasons import (
    BATCH_INVARIANT,
    KV_TRANSFER,
    in_words,
    mamba_cache_mode,
)
from nwor_bench.report.document import Table, table
from nwor_bench.report.text import joined, plural

WORDS = {
    Outcome.STAGED: "staged",
    Outcome.DIRECT: "written directly",
    Outcome.REFUSED: "refused by vLLM",
}


def answer(support: Support) -> str:
    """The answer in one sentence."""
    layers = sum(g.count for g in support.groups if g.layer.kind is not Kind.NOTHING)
    if support.reason is None:
        states = sum(group.count for group in support.recurrent)
        if states:
            kept = (
                f", and the states of {states} recurrent layers."
                if support.part is Part.BOTH
                else f"; the {states} recurrent layers stay as stock vLLM runs them."
            )
            attend = plural(layers - states, "attention layer")
            return f"{support.model.name}: drafts would be staged in the {attend}{kept}"
        every = "its one layer" if layers == 1 else f"all {layers} layers"
        return f"{support.model.name}: drafts would be staged, in {every}."
    return (
        f"{support.model.name}: every draft would be written directly, as stock vLLM does: "
        f"{in_words(support.reason)}."
    )


def what(layer: LayerFacts) -> str:
    """A layer in a few words."""
    if layer.kind in (Kind.RECURRENT, Kind.NOTHING):
        return layer.kind.value
    marks = {
        "latent": layer.latent, "selected context": layer.sparse, "sinks": layer.sinks,
        "ALiBi": layer.alibi, "shares K/V": layer.shares_kv,
    }  # fmt: skip
    window = f" of {layer.window:,}" if layer.window else ""
    size = f", head size {layer.head_dim}" if layer.head_dim else ""
    size += f", values of {layer.value_dim}" if layer.value_dim else ""
    return layer.kind.value + window + size + "".join(f", {m}" for m, on in marks.items() if on)


def layers_table(support: Support) -> Table:
    """One row for each kind of layer."""
    rows = [
        (str(group.count), what(group.layer), group.backend or "", _drafts(group, support))
        for group in support.groups
    ]
    return table(("layers", "what", "backend", "drafts"), rows, numbers_from=4)


def _drafts(group: LayerGroup, support: Support) -> str:
    """How drafts are handled in these layers."""
    if group.layer.kind is Kind.NOTHING:
        return "without K/V"
    if group.reason is not None:
        return f"written directly: {in_words(group.reason)}"
    return "staged" if support.reason is None else "written directly, as in the other layers"


def methods_lines(methods: Sequence[MethodSupport]) -> Iterator[str]:
    """A sentence for each outcome and reason, with the methods that share it."""
    sharing: dict[tuple[Outcome, str | None], list[str]] = {}
    for each in methods:
        sharing.setdefault((each.outcome, each.reason), []).append(each.method.value)
    for (outcome, reason), names in sharing.items():
        why = "" if reason is None else f": {in_words(reason)}"
        meaning = " (kept out of the cache until accepted)" if outcome is Outcome.STAGED else ""
        said = WORDS[outcome] + meaning
        yield f"{said[0].upper()}{said[1:]} with {joined(names)}{why}."


def notes(support: Support) -> list[str]:
    """Assumptions of the prediction."""
    notes = [
        "Predicted only from the config.json, for vLLM 0.32 and 0.33 and their own choices, if "
        "vLLM has the architecture; the plugin decides in the engine, and a run's report has its "
        f"reason. With KV transfer ({KV_TRANSFER}) or VLLM_BATCH_INVARIANT=1 ({BATCH_INVARIANT}) "
        "it stages nothing.",
        "eagle, eagle3, dflash, dspark and draft_model need a drafter made for this model.",
    ]
    if support.part is Part.BOTH:
        notes.append(
            "States only with enable_prefix_caching=false: vLLM's default copies them at the end "
            f"of each block ({mamba_cache_mode('align')})."
        )
    if any((g.layer.head_dim or 0) > 256 and not g.layer.latent for g in support.groups):
        notes.append("Without FlashAttention 4 vLLM takes Triton.")
    return notes


def support_values(support: Support, methods: Sequence[MethodSupport]) -> dict[str, Any]:
    """Everything for JSON."""
    return {
        "model": support.model.name,
        "architecture": support.model.architecture,
        "answer": {
            "outcome": support.outcome.value,
            "reason": support.reason,
            "part": support.part.value,
            "sentence": answer(support),
        },
        "device": support.engine.device.value,
        "runner": support.runner.value,
        "backends": list(support.backends),
        "layers": [
            {
                "count": group.count,
                "what": what(group.layer),
                "backend": group.backend,
                "reason": group.reason,
            }
            for group in support.groups
        ],
        "methods": [
            {
                "method": m.method.value,
                "outcome": m.outcome.value,
                "runner": m.runner.value if m.runner else None,
                "reason": m.reason,
            }
            for m in methods
        ],
    }
