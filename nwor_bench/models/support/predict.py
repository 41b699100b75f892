"""The plugin's decision for a model's drafts, from its config.json.

The rules (`rules.py`) are the plugin's own, so the first reason is the one that it would report.
All attention layers of the target stage, or none; if they do, the states of gated delta nets beside
them stage too, and those of other recurrent layers stay stock.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nwor_bench.instruments.cards import Device
from nwor_bench.models.config_reader import Kind
from nwor_bench.models.methods import NOT_ON_CPU, Method, why_no_mtp
from nwor_bench.models.support.facts import (
    EngineFacts,
    LayerFacts,
    ModelFacts,
    Runner,
    attention_of,
)
from nwor_bench.models.support.rules import (
    LAYER_RULES,
    MODULE_RULES,
    RUNNER_RULES,
    STATE_RULES,
    PlannedLayer,
    first_reason,
)
from nwor_bench.records import fallback_reasons as reasons


class Outcome(StrEnum):
    """How drafts are handled."""

    STAGED = "staged"
    DIRECT = "direct"
    REFUSED = "refused"


class Part(StrEnum):
    """What of a window is staged."""

    KV = "K/V"
    BOTH = "both"
    NONE = "none"


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are alike, and why they would be written directly; None if they stage."""

    count: int
    layer: LayerFacts
    backend: str | None
    reason: str | None


@dataclass(frozen=True)
class Support:
    """The prediction for a model and an engine with one of the methods that stage."""

    model: ModelFacts
    engine: EngineFacts
    runner: Runner
    groups: tuple[LayerGroup, ...]
    reason: str | None

    @property
    def recurrent(self) -> tuple[LayerGroup, ...]:
        """The layers that keep states only."""
        return tuple(g for g in self.groups if g.layer.kind is Kind.RECURRENT)

    @property
    def part(self) -> Part:
        """What is staged of a window."""
        if self.reason is not None:
            return Part.NONE
        staged = self.recurrent and not any(group.reason for group in self.recurrent)
        return Part.BOTH if staged else Part.KV

    @property
    def outcome(self) -> Outcome:
        """STAGED if no reason speaks against it, else DIRECT."""
        return Outcome.STAGED if self.reason is None else Outcome.DIRECT

    @property
    def backends(self) -> tuple[str, ...]:
        """The attention backends of its layers, each once."""
        return tuple(dict.fromkeys(g.backend for g in self.groups if g.backend is not None))


def predict_support(model: ModelFacts, engine: EngineFacts) -> Support:
    """The prediction for a method that vLLM's default runner serves."""
    runner = Runner.V1 if engine.device is Device.CPU else Runner.V2
    counted = Counter(model.layers)
    groups = []
    for layer, count in counted.items():
        attention = attention_of(layer, model, engine.device, engine.cache_dtype)
        reason = why_layer(layer, model, engine)
        backend = None if attention is None else attention.backend
        groups.append(LayerGroup(count, layer, backend, reason))
    return Support(model, engine, runner, tuple(groups), why_direct(model, engine, runner))


def why_direct(model: ModelFacts, engine: EngineFacts, runner: Runner) -> str | None:
    """The reason under which the plugin would write every window directly; None if it stages."""
    if runner is Runner.V1 and engine.device is not Device.CPU:
        return reasons.V1_RUNNER_ON_GPU
    layers = _attention_layers(model)
    if runner is Runner.V2:
        why = first_reason((*RUNNER_RULES, *MODULE_RULES), planned=model)
        if why is not None:
            return why
    if not layers:
        return reasons.RECURRENT_LAYERS
    if runner is Runner.V1 and any(layer.sparse for layer in layers):
        return reasons.SPARSE_INDEXER  # its cache is met first
    found_in = (why_layer(layer, model, engine) for layer in layers)
    return next((reason for reason in found_in if reason is not None), None)


def why_layer(layer: LayerFacts, model: ModelFacts, engine: EngineFacts) -> str | None:
    """The reason of one layer by itself; None if it could be staged, or has nothing to stage.

    A recurrent layer that could not be staged stays stock, whether or not the others stage.
    """
    if layer.kind is Kind.RECURRENT:
        return first_reason(STATE_RULES, planned=layer)
    attention = attention_of(layer, model, engine.device, engine.cache_dtype)
    if attention is None:
        return None
    return first_reason(LAYER_RULES, planned=PlannedLayer(layer, model, engine, attention))


def _attention_layers(model: ModelFacts) -> list[LayerFacts]:
    """Attention layers as the plugin meets them: KV-cache group by group; sharing ones come last.

    Layers of one kind are one group, of any head size.
    """
    groups: dict[tuple[object, ...], list[LayerFacts]] = {}
    for layer in model.layers:
        if layer.kind in (Kind.RECURRENT, Kind.NOTHING) or layer.shares_kv:
            continue
        whole = layer.kind in (Kind.FULL, Kind.BOTH)
        key = (Kind.FULL,) if whole else (layer.kind, layer.window)
        groups.setdefault(key, []).append(layer)
    layers = [layer for group in groups.values() for layer in group]
    return layers + [layer for layer in model.layers if layer.shares_kv]


@dataclass(frozen=True)
class MethodSupport:
    """One method: the runner that serves it, and the outcome for drafts."""

    method: Method
    outcome: Outcome
    runner: Runner | None
    reason: str | None


def method_support(model: ModelFacts, engine: EngineFacts, method: Method) -> MethodSupport:
    """The prediction for one method; REFUSED if vLLM cannot start with it."""
    refused = _why_refused(model, engine, method)
    if refused is not None:
        return MethodSupport(method, Outcome.REFUSED, None, refused)
    on_v1 = engine.device is Device.CPU or method is Method.SUFFIX
    runner = Runner.V1 if on_v1 else Runner.V2
    reason = why_direct(model, engine, runner)
    outcome = Outcome.STAGED if reason is None else Outcome.DIRECT
    return MethodSupport(method, outcome, runner, reason)


def methods_of(model: ModelFacts, engine: EngineFacts) -> Iterator[MethodSupport]:
    """Every method, in the order of `Method`."""
    return (method_support(model, engine, method) for method in Method)


def _why_refused(model: ModelFacts, engine: EngineFacts, method: Method) -> str | None:
    """Why vLLM would not start; None if the config shows no reason."""
    if method in NOT_ON_CPU and engine.device is Device.CPU:
        return NOT_ON_CPU[method]
    if method is not Method.MTP:
        return None
    return why_no_mtp(model.model_type, model.architecture, model.mtp_layers)
