"""The local gate's copies are of what vLLM passed to a layer, whatever our wrappers made of it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_kernels.attention_step import AttentionStep

pytestmark = pytest.mark.slow  # vLLM's attention backends are imported


def attention_layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    from wrapped_layers import WrappedLayers

    layers: Any = WrappedLayers(staged=True, monkeypatch=monkeypatch)
    layers.begin("whole step")
    layers.given = [(layers.keys[n], layers.values[n], (layers.query,)) for n in range(3)]
    return layers


def latent_layers(monkeypatch: pytest.MonkeyPatch) -> Any:
    from latent_layers import LATENT, PE, LatentLayers

    layers: Any = LatentLayers([4, 4], monkeypatch)
    layers.begin(copied=False)
    query = layers.query.split([LATENT, PE], dim=-1)
    rows = (each[:, None].split([LATENT, PE], dim=-1) for each in layers.rows)
    layers.given = [(*both, query) for both in rows]
    return layers


def larger(original: Callable[..., Any], *places: int) -> Callable[..., Any]:
    """Called with the arguments at these places 10 % too large."""

    def ten_percent(each: Any) -> Any:
        if isinstance(each, AttentionStep):
            return each._replace(query=ten_percent(each.query))
        return tuple(map(ten_percent, each)) if isinstance(each, tuple) else each * 1.1

    def called(*given: Any) -> Any:
        return original(*(ten_percent(a) if n in places else a for n, a in enumerate(given)))

    return called


@pytest.mark.parametrize(
    ("make", "attend", "query_at"),
    [(attention_layers, "_verify", 1), (latent_layers, "verify", 0)],
)
def test_copies_are_of_what_vllm_passed(
    make: Callable[..., Any], attend: str, query_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_bench.plugin.observe.layer_checks import LayerChecks, WindowTrace

    layers = make(monkeypatch)
    for number, each in enumerate(layers.wrapped):
        each.layer.layer_name = str(number)
        monkeypatch.setattr(each, "slots_to_write", larger(each.slots_to_write, 0, 1))
        monkeypatch.setattr(each, attend, larger(getattr(each, attend), query_at))
    of_window = WindowTrace()
    trace = of_window.layers
    checks = LayerChecks(layers.wrapped, layers.staging, None, ())
    checks.follow(of_window)
    layers.forward()
    checks.follow(None)
    assert sorted(trace.calls) == [str(n) for n in range(len(layers.layers))]
    for number, (key, value, query) in enumerate(layers.given):
        call = trace.calls[str(number)]
        assert torch.equal(call.key, key)
        assert torch.equal(call.value, value)
        told = call.query if isinstance(call.query, tuple) else (call.query,)
        assert all(torch.equal(a, b) for a, b in zip(told, query, strict=True))
        assert torch.equal(call.output, layers.outputs[number])
    trace.calls.clear()
    layers.staging.trace = trace
    layers.window.abort("test")
    layers.forward()
    assert trace.calls == {}  # it ends with the window


@pytest.mark.parametrize("make", [attention_layers, latent_layers])
def test_planted_faults_of_one_layer_change_what_the_layers_have(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that finds nothing to change would only be seen on a GPU, as one that is missed."""
    from planted_layers import LAYER_FAULTS

    def outputs(plant: Callable[..., Any] | None = None, size: float = 0.0) -> Any:
        layers = make(monkeypatch)
        staged, parts = layers.staging, SimpleNamespace(layers=layers.wrapped, recurrent=None)
        worker = SimpleNamespace(nwor_hook=SimpleNamespace(name="V2", buffers=staged, _parts=parts))
        right = layers.wrapped[1].rules
        if make is attention_layers:
            right = replace(right, sliding_window=5, sinks=torch.zeros(4))
            layers.wrapped[1].rules = right
        applies = [fault.name for fault in LAYER_FAULTS if fault.applies(worker)]
        with plant(worker, size) if plant is not None else nullcontext():
            layers.forward()
            changed = layers.wrapped[1].rules is not right
        return layers.outputs, changed, applies

    sound, _, applies = outputs()
    kinds = [fault for fault in LAYER_FAULTS if fault.name in applies and "bits" not in fault.name]
    assert len(kinds) == (9 if make is attention_layers else 6)
    for fault in kinds:
        found, changed, _ = outputs(fault.plant, fault.must)
        assert torch.equal(found[0], sound[0])
        assert changed or not torch.equal(found[1], sound[1]), fault.name
