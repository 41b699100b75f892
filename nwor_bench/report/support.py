"""Prediction of what the plugin would do with a model's drafts, as a document and as JSON."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.models.config_reader import Kind
from nwor_bench.models.support.facts import LayerFacts
from nwor_bench.models.support.predict import LayerGroup, MethodSupport, Outcome, Part, Support
from nwor_bench.records.fallback_reasons import (
    BATCH_INVARIANT,
    KV_TRANSFER,
    mamba_cache_mode,
)
from nwor_bench.report.document import Bullets, Document, Headline, Paragraph, table

LAYER_HEADERS = ("layers", "what", "backend", "by themselves")
METHOD_HEADERS = ("method", "drafts", "runner", "why not staged")

WORDS = {
    Outcome.STAGED: "staged",
    Outcome.DIRECT: "written directly",
    Outcome.REFUSED: "refused by vLLM",
}


def support_document(support: Support, methods: Sequence[MethodSupport], origin: str) -> Document:
    """One model: the answer, its layers, the speculative methods, and notes."""
    drafts = [
        (m.method.value, WORDS[m.outcome], m.runner.value if m.runner else "", m.reason or "")
        for m in methods
    ]
    blocks = (
        Paragraph(f"{_setting(support)} Facts: {origin}."),
        table(LAYER_HEADERS, layer_rows(support), numbers_from=4),
        table(METHOD_HEADERS, drafts, numbers_from=4),
        Bullets(tuple(support_notes(support))),
    )
    return Document(support.model.name, (Headline("", answer(support)), *blocks))


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
            return (
                f"{support.model.name}: drafts would be staged in the {layers - states} attention "
                f"layers{kept}"
            )
        every = "its one layer" if layers == 1 else f"all {layers} layers"
        return f"{support.model.name}: drafts would be staged, in {every}."
    return (
        f"{support.model.name}: every draft would be written directly, as stock vLLM does: "
        f"{support.reason}."
    )


def _setting(support: Support) -> str:
    """How the answer was made."""
    engine = support.engine
    backends = ", ".join(support.backends) or "no attention"
    return (
        f"{support.model.architecture or support.model.model_type} on {engine.device.value}, "
        f"vLLM's {support.runner.value} runner, {backends}; {engine.draft_tokens} drafts a window, "
        f"cache {engine.cache_dtype}. Staged of K/V and states: {support.part.value}. All "
        "attention layers are staged, or none is."
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


def layer_rows(support: Support) -> list[tuple[str, ...]]:
    """One row for each kind of layer, under LAYER_HEADERS."""
    return [
        (str(group.count), what(group.layer), group.backend or "", _by_itself(group))
        for group in support.groups
    ]


def _by_itself(group: LayerGroup) -> str:
    if group.layer.kind is Kind.NOTHING:
        return "nothing to stage"
    return group.reason or "could be staged"


def support_notes(support: Support) -> list[str]:
    """Assumptions of the prediction."""
    notes = [
        "Predicted only from the config.json, for vLLM 0.32 and its own choices, if vLLM has the "
        "architecture; the plugin decides in the engine, and a run's report has its reason. With "
        f"KV transfer ({KV_TRANSFER}) or VLLM_BATCH_INVARIANT=1 ({BATCH_INVARIANT}) it stages "
        "nothing.",
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
