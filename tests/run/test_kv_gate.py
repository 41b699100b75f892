"""The gate's checks of K/V and writes: which positions, tolerance and verdict; no engine."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import OWN_ERROR, FakeEngine, FakeKvCache
from hypothesis import given
from hypothesis import strategies as st
from tiny_session import RUN, begin
from toy_run import BASELINE, STAGE, Runner

from nwor_bench.analysis.parity.kv import (
    TOO_BLUNT,
    compare_exactly,
    compare_within,
    compared_layers,
    tolerances,
    write_fault,
)
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.records.types import NworMode
from nwor_bench.run.gate.kv import BUDGET_BYTES, choose_spans, groups_that_fit, rows_budget

LENGTHS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), max_size=6)


@given(LENGTHS, st.integers(0, 400))
def test_output_positions_come_first_and_room_is_used_up(
    lengths: list[tuple[int, int]], room: int
) -> None:
    spans = choose_spans(lengths, room)
    committed = [prompt + output - 1 for prompt, output in lengths]
    assert [stop for _, stop in spans] == committed
    assert all(0 <= start <= stop for start, stop in spans)
    kept = sum(stop - start for start, stop in spans)
    assert kept <= room
    outputs = [max(output - 1, 0) for _, output in lengths]
    covered = sum(
        min(stop - start, output) for (start, stop), output in zip(spans, outputs, strict=True)
    )
    assert kept == covered or covered == sum(outputs)  # prompts only after every output
    assert min(room, sum(committed)) - kept < max(len(lengths), 1)


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(1, 32), st.integers(1, 20))
def test_groups_fit_into_the_cache(lengths: list[int], size: int, blocks: int) -> None:
    groups = groups_that_fit(lengths, size, blocks)
    assert [number for group in groups for number in group] == list(range(len(lengths)))
    for group in groups:
        needed = sum(-(-lengths[number] // size) for number in group)
        assert needed <= blocks or len(group) == 1


def test_the_budget_leaves_the_host_its_memory() -> None:
    assert rows_budget(1 << 40, 1) == BUDGET_BYTES
    assert rows_budget(8 << 30, 2) == 1 << 30


def entry(layer: int = 0, what: str = "K", **numbers: Any) -> dict[str, Any]:
    """One layer's errors as they usually are; `numbers` are what is unusual."""
    place = {"request": 2, "position": 7, "head": 1}
    usual = {
        "layer": layer, "name": f"layers.{layer}", "what": what, "part": "output", "rows": 500,
        "largest": 0.01, "rms": 0.005, "median": 0.002,
        "place": place, "differing": 0, "first": None, "one_step": 1e-4, "one_element": 1e-5,
    }  # fmt: skip
    return {**usual, **numbers}


def one_rank(*entries: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"checked": 10, "unknown": 0, "errors": list(entries)}]


def checked(*found: dict[str, Any], **own: float) -> tuple[Any, bool]:
    """A cell's errors against a tolerance from mode off's own, the same in every layer."""
    layers = {(e["layer"], e["what"]) for e in found}
    allowed, why_not = tolerances([one_rank(*(entry(*place, **own) for place in layers))])
    assert why_not is None
    return compare_within(one_rank(*found), allowed)


EQUAL = {"largest": 0.0, "rms": 0.0, "median": 0.0}
"""Mode off's own errors if it equals itself: one rounding step is allowed."""


@pytest.mark.parametrize(
    ("found", "own", "layer", "broken"),
    [
        ([entry(0, largest=0.012), entry(1, largest=0.025)], {}, 1, False),
        ([entry(0, largest=0.02, rms=0.011)], {}, 0, True),
        ([entry(0, largest=0.02, median=0.006)], {}, 0, True),
        # RMS and median of a few rows decide nothing.
        ([entry(0, largest=0.02, rms=0.02, median=0.02, rows=99)], {}, 0, False),
        # The lowest broken layer is named.
        ([entry(2, largest=5.0), entry(1, largest=0.4), entry(0, largest=0.01)], {}, 1, True),
        ([entry(0, largest=None, rms=None)], {}, 0, True),
        ([entry(0, largest=1e-4, rms=1e-5, median=0.0)], EQUAL, 0, False),
        ([entry(0, largest=2e-4, rms=1e-5, median=0.0)], EQUAL, 0, True),
    ],
)
def test_a_layer_is_broken_beyond_a_multiple_of_mode_offs_own_errors(
    found: list[dict[str, Any]], own: dict[str, float], layer: int, broken: bool
) -> None:
    finding, is_broken = checked(*found, **own)
    assert (finding.layer, is_broken) == (layer, broken)


def test_one_wrong_row_is_found_by_the_largest_error() -> None:
    finding, broken = checked(entry(0, largest=0.01), entry(1, "V", largest=1.0))
    assert broken
    assert finding.sentence(1) == (
        "K/V: layer 1 (layers.1), request 2, position 7 (of its output), V, head 1: the layer's "
        "largest error is 1 of a row's norm, 0.03 is allowed (mode off against itself: 0.01)"
    )
    assert "head 1 of rank 0" in finding.sentence(2)


def test_a_row_that_is_not_finite_is_infinitely_far_off() -> None:
    finding, _ = checked(entry(0, largest=None, rms=None))
    assert finding.ratio == float("inf")
    assert finding.sentence(1).endswith("head 1: not a finite number")


def test_rows_of_mode_off_that_are_not_finite_give_no_tolerance() -> None:
    allowed, why_not = tolerances([one_rank(entry(0, largest=0.1), entry(1, largest=None))])
    assert (allowed, why_not) == ({}, "rows of mode off itself are not finite in layers.1, K")


def test_the_worst_of_several_comparisons_of_mode_off_counts() -> None:
    twice = [
        one_rank(entry(0, largest=0.01)),
        one_rank(entry(0, largest=0.05, rms=0.001, median=0.003)),
    ]
    allowed, _ = tolerances(twice)
    assert allowed[0, 0, "K"].own == {"largest": 0.05, "rms": 0.005, "median": 0.003}


def test_each_rank_has_a_tolerance_of_its_own() -> None:
    own = [*one_rank(entry(0, largest=0.01)), *one_rank(entry(0, largest=0.5))]
    allowed, _ = tolerances([own])
    cell = [*one_rank(entry(0, largest=0.02)), *one_rank(entry(0, largest=0.6))]
    assert not compare_within(cell, allowed)[1]
    finding, broken = compare_within(cell[::-1], allowed)
    assert broken
    assert finding is not None
    assert finding.rank == 0


def test_what_a_router_did_to_mode_off_in_one_layer_it_may_do_in_any() -> None:
    """Qwen3-Next on an H200: mode off had chosen otherwise in front of other layers than ours."""
    own = [entry(0, largest=0.007), entry(1, largest=0.05), entry(2, largest=0.84)]
    values = [entry(0, "V", largest=0.004), entry(1, "V", largest=0.003)]
    allowed, _ = tolerances([one_rank(*own, *values)], routed=True)
    assert not compare_within(one_rank(entry(0, largest=0.026), *values), allowed)[1]
    for wrong in (entry(0, largest=0.16), entry(0, "V", largest=0.026), entry(0, rms=0.02)):
        assert compare_within(one_rank(wrong), allowed)[1]
    assert not allowed[0, 2, "K"].compares  # nor does it blunt the others
    dense, _ = tolerances([one_rank(*own, *values)])
    assert compare_within(one_rank(entry(0, largest=0.026)), dense)[1]


@pytest.mark.parametrize(("experts", "verdict"), [(512, "within tolerance"), (0, "INVALID")])
def test_the_gate_knows_whether_the_target_has_experts(
    tmp_path: Path, experts: int, verdict: str
) -> None:
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE, by=0.05, own=(0.01, 0.005, 0.1))
    _, run = swept(tmp_path, kv, device="cuda:0", experts=experts)
    assert run.header.kv_gate.cells[STAGE.label]["verdict"] == verdict


def test_bit_for_bit_the_first_row_of_the_lowest_layer_is_named() -> None:
    early, late = ({"request": r, "position": 4, "head": 0} for r in (0, 3))
    found = compare_exactly(
        one_rank(
            entry(0),
            entry(2, largest=9.0, differing=5, first=early),
            entry(1, "V", largest=1e-7, differing=1, first=late),
        )
    )
    assert found is not None
    assert (found.layer, found.what, found.request, found.position) == (1, "V", 3, 4)
    assert found.ratio == float("inf")
    assert "bit for bit" in found.sentence(1)
    assert compare_exactly(one_rank(entry(0), entry(1))) is None


# The gate in a sweep, on a stand-in engine.


def swept(folder: Path, kv: FakeKvCache, **engine: Any) -> tuple[Runner, Any]:
    runner = Runner(folder / "run", FakeEngine(kv=kv, **engine))
    return runner, runner.run()


def test_every_staging_cell_is_checked_and_told(tmp_path: Path) -> None:
    runner, run = swept(tmp_path, FakeKvCache())
    gate = run.header.kv_gate
    staging = {cell for cell in runner.plan.cells if cell.nwor_mode is NworMode.STAGE}
    assert set(gate.cells) == {cell.label for cell in staging}
    assert {cell["verdict"] for cell in gate.cells.values()} == {"equal bit for bit"}
    told = [event for event in run.events if event["event"] == "kv_gate"]
    assert {(e["nwor_mode"], e["scv_mode"]) for e in told} == {
        (str(cell.nwor_mode), str(cell.scv_mode)) for cell in staging
    }
    assert runner.engine.kv.watched == [True, False]
    assert runner.engine.kv.prefills == []  # tokens are equal, and a CPU has one attention
    assert set(runner.engine.kv.kept) == {"off"}


def test_the_control_is_checked_as_what_stages(tmp_path: Path) -> None:
    kv = FakeKvCache(wrong=lambda cell: cell.nwor_mode is NworMode.CONTROL)
    runner = Runner(tmp_path / "run", FakeEngine(kv=kv), interleave="windows", batches=1)
    run = runner.run()
    result = run.header.kv_gate.cells["control x off"]
    assert result["verdict"] == "INVALID"
    assert [cell.label for cell in runner.sweep.parity.broken] == ["control x off"]
    (batch,) = [batch for batch in run.batches if batch.phase == "interleaved"]
    turns = {window.cell.label for window in run.windows if window.batch == batch.batch}
    assert "control x off" not in turns
    assert "stage x off" in turns


def test_on_a_gpu_the_reference_is_what_mode_off_prefills(tmp_path: Path) -> None:
    runner, run = swept(tmp_path, FakeKvCache(), device="cuda:0")
    gate = run.header.kv_gate
    cells = list(gate.cells.values())
    assert {cell["verdict"] for cell in cells} == {"within tolerance"}
    assert gate.own_errors["largest"] == {"smallest": OWN_ERROR, "largest": OWN_ERROR}
    kv = runner.engine.kv
    ((cell, together),) = kv.prefills  # all cells share one reference
    assert cell == BASELINE
    first, second = kv.nudged  # mode off against itself: in halves, a rounding step apart
    assert together == first + second
    prompts, tokens = runner.engine.calls[1].prompts, 8
    assert [ids[: len(p)] for ids, p in zip(together, prompts, strict=True)] == list(prompts)
    assert [len(ids) for ids in together] == [len(p) + tokens - 1 for p in prompts]


@pytest.mark.parametrize(
    ("roundings", "verdict"), [(4, "within tolerance"), (8, "INVALID"), (2.0**23, "INVALID")]
)
def test_on_a_cpu_another_order_of_sums_is_judged_as_on_a_gpu(
    tmp_path: Path, roundings: float, verdict: str
) -> None:
    """A few roundings of float32: libraries of a busy CPU may sum otherwise. More is a fault."""
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE, by=roundings * 2.0**-23)
    runner, run = swept(tmp_path, kv)
    result = run.header.kv_gate.cells[STAGE.label]
    assert result["verdict"] == verdict
    assert (STAGE in runner.sweep.parity.broken) == (verdict == "INVALID")
    others = [c for label, c in run.header.kv_gate.cells.items() if label != STAGE.label]
    assert {cell["verdict"] for cell in others} == {"equal bit for bit"}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("lost", [False, True])
def test_a_cell_with_a_wrong_row_is_invalid_and_not_timed(
    tmp_path: Path, device: str, lost: bool
) -> None:
    """Also if one group had nothing to check: `checked` is that of the group with the fewest."""
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE, lost=lost)
    runner, run = swept(tmp_path, kv, device=device)
    reason = runner.sweep.parity.broken[STAGE]
    assert reason.startswith("K/V: layer 1 (layers.1), request 1, position 5")
    assert list(runner.sweep.parity.broken) == [STAGE]
    timed = [batch.cell for batch in run.batches if batch.phase == "timed"]
    assert STAGE not in timed
    assert BASELINE in timed
    (event,) = [event for event in run.events if event["event"] == "parity_broken"]
    assert (event["nwor_mode"], event["scv_mode"], event["reason"]) == ("stage", "off", reason)
    result = run.header.kv_gate.cells[STAGE.label]
    assert (result["verdict"], result["reason"]) == ("INVALID", reason)
    assert result["finding"]["ratio"] == (None if device == "cpu" else pytest.approx(100 / 3))


def test_tokens_that_differ_are_named_beside_the_rows(tmp_path: Path) -> None:
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE)
    runner, _ = swept(tmp_path, kv, wrong=lambda number, cell: cell == STAGE)
    reason = runner.sweep.parity.broken[STAGE]
    assert "output token" in reason
    assert "; K/V: layer 1" in reason
    assert runner.sweep.kv_gate.results[STAGE].compared_with is not None


class OtherTokens(FakeEngine):
    """Staging cells begin the last request's answer with another token."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any
    ) -> BatchOutput:
        output = super().generate(prompts, sampling, **more)
        assert self.cell is not None
        if self.cell.nwor_mode is NworMode.OFF:
            return output
        *others, last = output.token_ids
        return replace(output, token_ids=(*others, (last[0] + 1, *last[1:])))


def test_other_tokens_have_a_reference_of_their_own(tmp_path: Path) -> None:
    runner = Runner(tmp_path / "run", OtherTokens(device="cuda:0"))
    runner.run()
    sizes = [len(ids) for _, ids in runner.engine.kv.prefills]
    assert sizes == [2, 1]  # off x off's, and once the request that differs
    assert [len(ids) for ids in runner.engine.kv.nudged] == [1, 1]
    verdicts = {str(result.verdict) for result in runner.sweep.kv_gate.results.values()}
    assert verdicts == {"within tolerance"}


@pytest.mark.parametrize(
    ("kv", "reason"),
    [
        (FakeKvCache(unreadable="layers.0 has no cache"), "layers.0 has no cache"),
        (FakeKvCache(lost=True), "no position could be checked in every layer: other requests"),
    ],
)
def test_what_could_not_be_checked_is_said(tmp_path: Path, kv: FakeKvCache, reason: str) -> None:
    runner, run = swept(tmp_path, kv)
    for cell in run.header.kv_gate.cells.values():
        assert cell["verdict"] == "not run"
        assert cell["reason"].startswith(reason)
    assert runner.sweep.parity.broken == {}


def test_layers_in_which_a_wrong_row_would_pass_are_not_counted(tmp_path: Path) -> None:
    """Three times 0.3 of a norm is more than half of a wrong row's error; the others are sharp."""
    runner, run = swept(tmp_path, FakeKvCache(own=(0.01, 0.01, 0.3)), device="cuda:0")
    for cell in run.header.kv_gate.cells.values():
        assert (cell["verdict"], cell["layers"], cell["of_layers"]) == ("within tolerance", 2, 3)
    assert runner.sweep.parity.broken == {}
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE, own=(0.3, 0.01, 0.3))
    assert list(swept(tmp_path / "wrong", kv, device="cuda:0")[0].sweep.parity.broken) == [STAGE]


def test_if_every_layer_is_blunt_nothing_was_compared(tmp_path: Path) -> None:
    """An unrelated row is 1.4 off, and mode off itself 0.8."""
    kv = FakeKvCache(wrong=lambda cell: cell == STAGE, by=1.4, own=(0.8, 0.8, 0.8))
    runner, run = swept(tmp_path, kv, device="cuda:0")
    for cell in run.header.kv_gate.cells.values():
        assert (cell["verdict"], cell["reason"]) == ("not run", TOO_BLUNT)
        assert (cell["layers"], cell["of_layers"]) == (0, 3)
    assert runner.sweep.parity.broken == {}


def test_a_blunt_layer_still_shows_what_is_not_finite_or_wrong_in_every_row() -> None:
    own = {"largest": 0.8, "rms": 0.1, "median": 0.05}
    assert not checked(entry(0, largest=1.4, rms=0.19, median=0.09), **own)[1]
    finding, broken = checked(entry(0, largest=None, rms=None, rows=99), **own)
    assert (broken, finding.error) == (True, None)
    finding, broken = checked(entry(0, largest=1.4, rms=0.21, median=0.05), **own)
    assert (broken, finding.measure) == (True, "rms")


def test_a_layer_is_compared_if_k_and_v_are_on_every_rank() -> None:
    sharp, blunt = {"largest": 0.2}, {"largest": 0.3}
    ranks = [
        *one_rank(entry(0, **sharp), entry(0, "V", **sharp), entry(1, **sharp), entry(2, **blunt)),
        *one_rank(entry(0, **sharp), entry(0, "V", **sharp), entry(1, **blunt), entry(2, **sharp)),
    ]
    allowed, _ = tolerances([ranks])
    assert compared_layers(allowed, "KV") == {0}
    allowed, _ = tolerances([one_rank(entry(0, **sharp), entry(0, "V", **blunt))])
    assert compared_layers(allowed, "KV") == set()


def test_if_nothing_can_be_staged_nothing_is_asked(tmp_path: Path) -> None:
    runner, run = swept(tmp_path, FakeKvCache(), bytes_per_token=None)
    assert runner.engine.kv.watched == []
    assert runner.engine.kv.kept == {}
    for cell in run.header.kv_gate.cells.values():
        assert cell["verdict"] == "not run"


SOUND = {"windows": 4, "early": 0, "uneven": 0, "written": 7, "without_slot": 0}


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([], None),
        ([SOUND], None),
        ([SOUND, SOUND], None),
        ([{**SOUND, "early": 3}], "3 staged rows were written before their commit"),
        ([SOUND, {**SOUND, "uneven": 1}], "in every layer alike on rank 1"),
        ([{**SOUND, "written": 8}], "8 drafts are in the cache .* but 7 were accepted"),
        ([{**SOUND, "written": 6}], "6 drafts are in the cache .* but 7 were accepted"),
        ([{**SOUND, "written": 6, "without_slot": 1}], None),  # beyond the model's length
        ([{**SOUND, "windows": 0, "written": 0}], None),  # nothing was staged
    ],
)
def test_what_the_writes_say(ranks: list[dict[str, int]], says: str | None) -> None:
    found = write_fault(ranks, accepted=7)
    if says is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith("writes: ")
        assert re.search(says, found)


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings")
def test_a_cell_that_writes_early_is_invalid() -> None:
    engine = FakeEngine()
    switched: list[tuple[bool, str]] = []

    def watch_writes(on: bool) -> list[dict[str, int]]:
        assert engine.cell is not None
        switched.append((on, engine.cell.label))
        graph = engine.cell.label == "stage x graph"
        return [{**SOUND, "windows": int(graph), "early": int(graph)}]

    engine.watch_writes = watch_writes  # type: ignore[method-assign]
    assert begin(engine) is ExitCode.CORRECTNESS_BROKEN
    run = read_run(RUN)
    broken = run.header.parity.broken
    assert broken == {"stage x graph": "writes: 1 staged rows were written before their commit"}
    timed = {b.scv_mode for b in run.batches if b.phase == "timed" and b.nwor_mode == "stage"}
    assert timed == {"off", "adaptive"}  # a broken cell is not timed
    cells = {label for _, label in switched}
    assert all(label.startswith(str(NworMode.STAGE)) for label in cells)
    assert [on for on, _ in switched] == [True, False] * len(cells)  # the gate's batch alone
