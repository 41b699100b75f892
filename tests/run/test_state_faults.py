"""Which faults of recurrent states the end-to-end gate finds among a router's choices, on made-up
states with the real measures: rounding in all of them, and some requests of some layers far off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from nwor_bench.analysis.parity.kv import KvVerdict, StateResult
from nwor_bench.engine.protocol import Kept, KeptPair
from nwor_bench.plugin.observe.errors import RowErrors, RowPlaces
from nwor_bench.run.gate.states import FEW, StateGate

pytestmark = pytest.mark.slow

LAYERS, REQUESTS, HEADS, WIDTH = 8, 8, 32, 64
ROUNDING = 0.01
FLIP = 0.3
"""Error of a request's states behind a token that went to other experts."""

SEEDS = 5

Fault = Callable[[int, Tensor], None]
"""Changes the recurrent states of one layer in place."""
States = list[tuple[Tensor, Tensor]]


@dataclass
class Machine:
    """An engine whose states are never twice the same.

    Args:
        flips: chance of a request in a layer, by layer.
        requests: number of them.
    """

    flips: Callable[[int], float]
    rng: torch.Generator
    requests: int = REQUESTS
    live: States = field(default_factory=list)
    kept: dict[str, States] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = [tuple(range(100 + i)) for i in range(self.requests)]
        self.exact = [
            (self._noise(self.requests, HEADS, WIDTH), self._noise(self.requests, 1, WIDTH))
            for _ in range(LAYERS)
        ]

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def run(self) -> None:
        """A batch in mode off, or a sound one of another mode."""
        self.live = []
        for layer, both in enumerate(self.exact):
            flipped = torch.rand(self.requests, 1, 1, generator=self.rng) < self.flips(layer)
            state, inputs = (
                exact + (ROUNDING + FLIP * flipped) * self._noise(*exact.shape) for exact in both
            )
            self.live.append((state, inputs))

    @property
    def states(self) -> Self:
        return self

    def keep(self, name: str) -> Kept:
        self.kept[name] = self.live
        return Kept(tokens={i: len(ids) for i, ids in enumerate(self.ids)})

    def prefill(self, *_: Any, **__: Any) -> None:
        self.run()

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            del self.kept[name]

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> list[dict[str, Any]]:
        ours, theirs = [i for i, *_ in pairs], [j for _, _, j, _ in pairs]
        (other,) = {pair[1] for pair in pairs}
        at = torch.tensor([len(self.ids[i]) for i in ours])
        errors = RowErrors(RowPlaces(torch.tensor(ours), at, torch.ones_like(at).bool()))
        for layer, (own, reference) in enumerate(
            zip(self.kept[name], self.kept[other], strict=True)
        ):
            for what, a, b in zip(("recurrent state", "convolution state"), own, reference,
                                  strict=True):  # fmt: skip
                labels = {"layer": layer, "name": f"net {layer}", "what": what}
                errors.add(labels, a[ours], b[theirs], "auto")
        return [{"errors": errors.read()}]


def some_layers(layer: int) -> float:
    """Routers are unsteady in front of two layers."""
    return 0.12 if layer < 2 else 0.0


def any_layer(layer: int) -> float:
    return 0.05


def steady(layer: int) -> float:
    return 0.0


def checked(machine: Machine, fault: Fault | None, *, routed: bool = True) -> StateResult:
    gate = StateGate(machine, lambda: None, routed)  # type: ignore[arg-type]
    machine.run()
    gate.keep_off(machine.ids)
    machine.run()
    for layer, (state, _) in enumerate(machine.live):
        if fault is not None:
            fault(layer, state)
    gate.keep_cell(machine.ids)
    return gate.compare()


def requests_are(value: float, *requests: int) -> Fault:
    def fault(layer: int, states: Tensor) -> None:
        if layer >= 2:
            states[list(requests)] = value

    return fault


def heads_are_zero(heads: int) -> Fault:
    def fault(layer: int, states: Tensor) -> None:
        if layer >= 2:
            states[:, :heads] = 0

    return fault


def swapped(layer: int, states: Tensor) -> None:
    if layer >= 2:
        states[[5, 6, 7]] = states[[6, 7, 5]]


def scaled(layer: int, states: Tensor) -> None:
    if layer == 5:
        states *= 1.1


FAULTS: dict[str, Fault] = {
    "3 of 8 requests NaN": requests_are(float("nan"), 5, 6, 7),
    "1 of 8 requests infinite": requests_are(float("inf"), 3),
    "3 of 8 requests zero": requests_are(0.0, 5, 6, 7),
    "2 of 8 requests zero": requests_are(0.0, 2, 5),
    "1 of 8 requests zero in most layers": requests_are(0.0, 4),
    "3 of 8 requests swapped": swapped,
    "15 of 32 heads zero": heads_are_zero(15),
    "1 of 32 heads zero": heads_are_zero(1),
    "one layer scaled": scaled,
}

NOISES = [some_layers, any_layer, steady]


@pytest.mark.parametrize("flips", NOISES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_mixture_of_experts_is_found(
    fault: str, flips: Callable[[int], float]
) -> None:
    for seed in range(SEEDS):
        machine = Machine(flips, torch.Generator().manual_seed(seed))
        found = checked(machine, FAULTS[fault])
        assert found.verdict is KvVerdict.BROKEN, (seed, found)
        assert (found.reason or "").startswith("states: ")


@pytest.mark.parametrize("flips", NOISES)
def test_a_sound_mixture_of_experts_passes(flips: Callable[[int], float]) -> None:
    verdicts = [
        checked(Machine(flips, torch.Generator().manual_seed(seed)), None).verdict
        for seed in range(40)
    ]
    assert verdicts.count(KvVerdict.WITHIN) >= 39


def test_with_few_requests_any_layer_s_own_errors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a router chose otherwise is chance; what is far off is found all the same."""
    monkeypatch.setattr("test_state_faults.FLIP", 0.1)
    verdicts = dict.fromkeys((True, False), 0)
    for routed, seed in product(verdicts, range(40)):
        machine = Machine(any_layer, torch.Generator().manual_seed(seed), requests=4)
        verdicts[routed] += checked(machine, None, routed=routed).verdict is KvVerdict.WITHIN
    assert verdicts[True] >= 30 > verdicts[False]
    for seed in range(SEEDS):
        machine = Machine(any_layer, torch.Generator().manual_seed(seed), requests=4)
        assert checked(machine, requests_are(0.0, 2)).verdict is KvVerdict.BROKEN


def one_request_is_another(layer: int, states: Tensor) -> None:
    if layer == 4:
        states[3] = states[2]


def test_one_request_of_one_layer_may_be_a_router_s_choice_but_only_with_experts() -> None:
    made = torch.Generator().manual_seed(0)
    assert checked(Machine(steady, made), one_request_is_another).verdict is KvVerdict.WITHIN
    found = checked(Machine(steady, made), one_request_is_another, routed=False)
    assert found.verdict is KvVerdict.BROKEN
    assert found.finding is not None
    assert (found.finding.layer, found.finding.measure) == (4, "largest")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dense_model_s_blunt_layers_hide_no_fault_of_the_others(fault: str) -> None:
    for seed in range(SEEDS):
        machine = Machine(some_layers, torch.Generator().manual_seed(seed))
        found = checked(machine, FAULTS[fault], routed=False)
        assert found.verdict is KvVerdict.BROKEN, (seed, found)


def test_the_result_counts_what_was_compared() -> None:
    found = checked(Machine(some_layers, torch.Generator().manual_seed(1)), None, routed=False)
    assert (found.layers, found.of_layers) == (6, 8)
    assert (found.states, found.convolutions) == (6 * REQUESTS, 6 * REQUESTS)


def test_a_layer_in_which_routers_move_mode_offs_own_requests_as_far_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("test_state_faults.FLIP", 0.5)
    for seed in range(SEEDS):
        found = checked(
            Machine(lambda layer: 0.2 * (layer == 3), torch.Generator().manual_seed(seed)), None
        )
        assert (found.verdict, found.layers) == (KvVerdict.WITHIN, LAYERS - 1)


def test_few_requests_of_a_mixture_of_experts_are_compared_as_a_dense_model_s() -> None:
    """A router's choice is not told from a fault then: the largest error decides."""
    made = torch.Generator().manual_seed(0)
    assert checked(Machine(steady, made, requests=3), None).verdict is KvVerdict.WITHIN
    wrong = checked(Machine(steady, made, requests=3), requests_are(0.0, 1))
    assert wrong.verdict is KvVerdict.BROKEN
    assert wrong.finding is not None
    assert wrong.finding.measure == "largest"


class EndsEarly(Machine):
    """Only three of a cell's requests are copied."""

    def keep(self, name: str) -> Kept:
        copied = super().keep(name)
        return Kept(tokens=dict(list(copied.tokens.items())[:3])) if name == "cell" else copied


def test_too_few_requests_of_the_cell_are_not_compared_by_routers_measures() -> None:
    found = checked(EndsEarly(any_layer, torch.Generator().manual_seed(0)), None)
    assert (found.verdict, found.reason) == (KvVerdict.NOT_RUN, FEW)
