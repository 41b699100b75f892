"""Which states the end-to-end gate compares with what, on a cache without values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pytest

from nwor_bench.analysis.parity.kv import TOO_BLUNT, KvVerdict, StateResult
from nwor_bench.engine.protocol import Kept, KeptPair
from nwor_bench.run.gate.states import (
    NONE_COPIED,
    NONE_OF_CELL,
    NOT_REPEATED,
    StateGate,
)

Ids = tuple[int, ...]
OWN = 0.01
"""What mode off's states differ by from themselves; three times that is allowed."""


@dataclass
class FakeStates:
    """States are copied after `copied` tokens of each request; prefilled ones after all.

    Args:
        wrong: error of the cell's states in layer 1, against whatever they are compared with.
        repeats: whether prefills are copied.
        own: error of mode off's states against its prefills, in each layer.
        rows: heads' states that are compared.
    """

    copied: dict[int, int]
    wrong: float = 0.005
    repeats: bool = True
    own: tuple[float, float] = (OWN, OWN)
    rows: int = 16
    asked: list[tuple[str, str, list[tuple[int, int]]]] = field(default_factory=list)
    prefills: list[tuple[list[Ids], bool]] = field(default_factory=list)
    to_off: int = 0
    kept: set[str] = field(default_factory=set)

    def prefill(
        self, sequences: Sequence[Sequence[int]], *, nudged: bool = False, outputs: int = 1
    ) -> None:
        assert outputs == 2
        self.prefills.append(([tuple(each) for each in sequences], nudged))

    @property
    def states(self) -> Self:
        return self

    def keep(self, name: str) -> Kept:
        self.kept.add(name)
        if name in ("off", "cell"):
            return Kept(tokens=self.copied)
        copied = dict(enumerate(map(len, self.prefills[-1][0]))) if self.repeats else {}
        return Kept(tokens=copied)

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> list[dict[str, Any]]:
        (other,) = {pair[1] for pair in pairs}
        assert {name, other} <= self.kept
        self.asked.append((name, other, [(i, j) for i, _, j, _ in pairs]))
        errors = (0.0, self.wrong) if name == "cell" else self.own
        found = [self._entry(layer, error) for layer, error in enumerate(errors)]
        return [{"errors": found}]

    def _entry(self, layer: int, error: float) -> dict[str, Any]:
        place = {"request": 0, "position": 5, "head": 1}
        names = {"layer": layer, "name": f"net {layer}", "what": "recurrent state"}
        sizes = {"largest": error, "rms": error, "median": error}
        steps = {"one_step": 1e-6, "one_element": 1e-7}
        return {**names, **sizes, **steps, "part": "output", "rows": self.rows, "place": place}

    def drop(self, names: Sequence[str]) -> None:
        self.kept -= set(names)


OFF: list[Ids] = [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10), (11, 12, 13, 14)]


def checked(cache: FakeStates, cell: Sequence[Ids], off: Sequence[Ids] = OFF) -> StateResult:
    def to_off() -> None:
        cache.to_off += 1

    gate = StateGate(cache, to_off)  # type: ignore[arg-type]
    gate.keep_off(off)
    gate.keep_cell(cell)
    return gate.compare()


def test_states_after_the_same_tokens_are_compared_with_off_x_offs() -> None:
    cache = FakeStates({0: 4, 2: 3})
    # Behind the copy tokens may differ.
    found = checked(cache, [(1, 2, 3, 4, 0), OFF[1], OFF[2]])
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert (found.sampled, found.requests, found.alike) == (2, 2, 2)
    assert (found.layers, found.states) == (2, 4)
    assert cache.asked[-1] == ("cell", "off", [(0, 0), (2, 2)])
    assert cache.prefills == [([(1, 2, 3, 4), (11, 12, 13)], nudged) for nudged in (False, True)]
    assert cache.asked[:2] == [
        ("once", "off", [(0, 0), (1, 2)]),
        ("again", "once", [(0, 0), (1, 1)]),
    ]
    assert cache.to_off == 2


def test_a_request_that_went_another_way_is_compared_with_its_own_tokens() -> None:
    cache = FakeStates({0: 4, 2: 3})
    found = checked(cache, [(1, 2, 0, 4, 5), OFF[1], OFF[2]])
    assert (found.sampled, found.requests, found.alike, found.states) == (2, 2, 1, 4)
    assert cache.asked[2:] == [("cell", "off", [(2, 2)]), ("cell", "own", [(0, 0)])]
    assert cache.prefills[-1] == ([(1, 2, 0, 4)], False)


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.029, KvVerdict.WITHIN), (0.031, KvVerdict.BROKEN)]
)
def test_more_than_three_times_mode_offs_own_error_breaks_the_cell(
    error: float, verdict: KvVerdict
) -> None:
    found = checked(FakeStates({0: 4}, wrong=error), OFF)
    assert found.verdict is verdict
    assert found.finding is not None
    assert (found.finding.layer, found.finding.allowed) == (1, pytest.approx(0.03))
    if verdict is KvVerdict.BROKEN:
        assert (found.reason or "").startswith("states: layer 1 (net 1), request 0, position 5")


def test_a_layer_in_which_a_wrong_state_would_pass_is_not_compared() -> None:
    # Three times 0.17 of a norm is no limit; the other layer has its own, as before.
    found = checked(FakeStates({0: 4}, wrong=0.029, own=(0.17, OWN)), OFF)
    assert (found.verdict, found.layers, found.of_layers) == (KvVerdict.WITHIN, 1, 2)
    assert (found.states, found.convolutions) == (1, 0)
    wrong = checked(FakeStates({0: 4}, wrong=0.031, own=(0.17, OWN)), OFF)
    assert wrong.verdict is KvVerdict.BROKEN
    assert wrong.finding is not None
    assert (wrong.finding.layer, wrong.finding.measure) == (1, "largest")
    none = checked(FakeStates({0: 4}, own=(0.3, 0.3)), OFF)
    assert (none.verdict, none.reason) == (KvVerdict.NOT_RUN, TOO_BLUNT)
    assert (none.states, none.of_layers) == (0, 2)


def test_what_could_not_be_compared_is_said() -> None:
    assert checked(FakeStates({}), OFF).reason == NONE_COPIED
    ended_early = checked(FakeStates({0: 4}), [(1, 2), OFF[1], OFF[2]])
    assert (ended_early.verdict, ended_early.reason) == (KvVerdict.NOT_RUN, NONE_OF_CELL)
    assert checked(FakeStates({0: 4}, repeats=False), OFF).reason == NOT_REPEATED
