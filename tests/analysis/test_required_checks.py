"""Which checks of the gate a cell needs, and what is said of one that compared nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_run import make_run

from nwor_bench.analysis.cell_data import CellData, GateResults, ungated_paths
from nwor_bench.analysis.parity.kv import TOO_BLUNT
from nwor_bench.analysis.parity.required import missing_checks
from nwor_bench.records.cell import Arguments, Drafts
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode, WindowRecord

STAGE = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)
CONTROL = Cell("toy", NworMode.CONTROL, ScvMode.OFF)
SOUND = {"verdict": "within tolerance", "states": {"verdict": "within tolerance"}}
LAYERS = {"verdict": "within tolerance", "states": 4}
EVICTED = {"verdict": "not run", "reason": "its blocks were reused"}
BLUNT = {"verdict": "not run", "reason": TOO_BLUNT}
NO_WINDOW = {"verdict": "not run", "reason": "no window was committed"}
GATE = GateResults(kv=SOUND, local=LAYERS, rule="acceptance only", checks_layers=True)


def window(staged: int = 4, states: int = 0, reason: str | None = None) -> Any:
    return SimpleNamespace(staged_tokens=staged, control_tokens=0, states_committed=states,
                           draft_tokens=4, fallback_reason=reason)  # fmt: skip


def missing(
    cell: Cell = STAGE, parity: str | None = "acceptance only", states: int = 0,
    interleaved: bool = False, **gate: Any,
) -> str | None:  # fmt: skip
    """What is missing of a cell whose gate has these results."""
    batch, own = [SimpleNamespace(parity=parity)], [window(states=states)]
    turns = own if interleaved else []
    data: Any = CellData(cell, batch, batch, own, interleaved=turns, gate=replace(GATE, **gate))  # type: ignore[arg-type]
    return missing_checks(data)


@pytest.mark.parametrize("cell", [STAGE, CONTROL])
@pytest.mark.parametrize("parity", ["acceptance only", "explained", "exact"])
def test_cells_with_kv_of_their_own_need_the_cache_and_their_layers(
    cell: Cell, parity: str
) -> None:
    assert missing(cell, parity) is None
    cache = "the gate did not compare its K/V with mode off's"
    assert missing(cell, parity, kv=EVICTED) == f"{cache} (its blocks were reused)"
    assert missing(cell, parity, kv=None) == f"{cache} (it did not run)"
    layers = "the gate did not check its layers on their own inputs"
    assert missing(cell, parity, local=NO_WINDOW) == f"{layers} (no window was committed)"
    assert missing(cell, parity, local=None) == f"{layers} (it did not run)"
    said = missing(cell, None, kv=EVICTED, local=NO_WINDOW) or ""
    assert [why.split(" (")[0] for why in said.split("; ")] == [
        "its output was not checked", cache, layers
    ]  # fmt: skip


def test_cells_that_staged_states_need_them_compared() -> None:
    sound = {**SOUND, "states": EVICTED}
    assert missing(states=0, kv=sound) is None
    assert missing(states=4) is None
    assert "its recurrent states with mode off's (its blocks" in (missing(states=4, kv=sound) or "")
    never = {**SOUND, "states": None}
    assert "(it did not run)" in (missing(states=4, kv=never) or "")
    beside_prefill = {**LAYERS, "states": 0}
    assert missing(states=4, local=beside_prefill) == (
        "the gate did not check its recurrent states on their own inputs"
    )


def test_layers_decide_if_mode_off_is_too_unstable_for_a_comparison_end_to_end() -> None:
    both = {**BLUNT, "states": BLUNT}
    assert missing(states=4, kv=both) is None
    assert "its K/V with" in (missing(kv=BLUNT, local=NO_WINDOW) or "")
    said = missing(states=4, kv=both, local={**LAYERS, "states": 0}) or ""
    assert "its recurrent states with" in said


def test_equal_tokens_in_float32_prove_values_end_to_end_but_not_the_layers() -> None:
    assert missing(parity="exact", rule="exact", kv=EVICTED) is None
    assert missing(parity="exact", rule="explained", kv=EVICTED) is not None
    assert missing(parity="explained", rule="exact", kv=EVICTED) is not None
    assert missing(parity="exact", rule="exact", local=NO_WINDOW) is not None


def test_a_cell_that_was_timed_interleaved_needs_an_interleaved_batch() -> None:
    assert missing(interleaved=True) == "the gate did not run it in an interleaved batch"
    assert missing(interleaved=True, interleaved_kv=(SOUND,)) is None
    said = "the gate did not compare its interleaved K/V with mode off's (its blocks were reused)"
    assert missing(interleaved=True, interleaved_kv=(EVICTED,)) == said
    assert missing(interleaved=True, interleaved_kv=(EVICTED, SOUND)) is None
    assert missing(interleaved=True, interleaved_kv=(BLUNT,)) is None
    of_states = {**SOUND, "states": EVICTED}
    assert missing(interleaved=True, interleaved_kv=(of_states,)) is None
    assert "interleaved recurrent states" in (
        missing(interleaved=True, states=4, interleaved_kv=(of_states,)) or ""
    )


def test_stock_needs_no_values_and_an_engine_of_its_own_only_those_of_layers() -> None:
    nothing: dict[str, Any] = {"kv": None, "local": None}
    off = NworMode.OFF, ScvMode.OFF
    for cell in (Cell("toy", *off), Cell("toy", *off, AA), Cell("toy", *off, Drafts(2))):
        assert missing(cell, **nothing) is None
        assert missing(cell, None, **nothing) == "its output was not checked"
    slots = replace(STAGE, arm=Arguments("nwor_state_slots=1"))
    assert missing(slots, "explained", states=4, kv=None) is None
    assert missing(slots, "explained", states=4, **nothing) is not None
    assert "its K/V" in (missing(slots, "acceptance only", kv=None) or "")
    assert missing(replace(STAGE, arm=Drafts(2)), "explained", kv=None) is not None


def test_a_run_without_any_check_of_layers_is_judged_as_it_was() -> None:
    old: dict[str, Any] = {"local": None, "checks_layers": False}
    assert missing(**old) is None
    assert missing(**old, kv=EVICTED) is not None
    assert missing(parity="explained", **old, kv=None) is None
    assert missing(states=4, **old, kv={**SOUND, "states": EVICTED}) is None


@pytest.mark.parametrize(
    ("direct", "beside_prefill", "words"),
    [(1, 0, None), (2, 0, None), (3, 0, "25% of its drafts, 100% timed (slower_than_stock 3)"),
     (0, 3, None)],
)  # fmt: skip
def test_a_gate_that_staged_little_of_what_is_timed_staged_is_no_check(
    direct: int, beside_prefill: int, words: str | None
) -> None:
    """At 28 of 928 drafts a value 1 % too large was CHECKED; beside a prefill nothing is staged."""
    batch: Any = SimpleNamespace(parity="exact")
    reasons = ["slower_than_stock"] * direct + ["beside_prefill"] * beside_prefill
    gated = [window(0, reason=reason) for reason in reasons]
    gated += [window() for _ in range(4 - len(gated))]
    for timed in ([window()], []):
        cell = CellData(STAGE, [batch], [batch][: len(timed)], timed, gated=gated, gate=GATE)
        found = missing_checks(cell)
        if words is None or not timed:  # a run that times nothing counts the gate's windows
            assert found is None
        else:
            assert words in (found or "")


WINDOW = make_run(blocks=1, windows=1).windows[0]
OURS, MERGE, READY = (
    "full graph, ours, joined",
    "full graph, merge, ready",
    "full graph, ours, ready",
)


def on(path: str | None, num_reqs: int = 8, batch: int = 9) -> WindowRecord:
    return replace(WINDOW, path=path, num_reqs=num_reqs, batch=batch)


@pytest.mark.parametrize(
    ("gated", "timed", "ungated"),
    [
        ([OURS, None], [on(OURS), on(MERGE), on(None), on(READY, batch=10)], (MERGE, READY)),
        ([OURS, MERGE, READY], [on(OURS), on(MERGE), on(READY, batch=10)], ()),
        ([], [on(None)], ()),  # an older version, whose windows have no path
        ([OURS], [on(OURS), on(READY, num_reqs=7)], ()),  # a batch that runs out has any size
        ([OURS], [on(OURS), on(READY, num_reqs=7), on(READY)], (READY,)),
    ],
)
def test_a_timed_path_must_be_one_of_the_gates(
    gated: list[str | None], timed: list[WindowRecord], ungated: tuple[str, ...]
) -> None:
    assert ungated_paths([on(path, batch=1) for path in gated], timed) == ungated
