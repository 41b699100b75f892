"""The gate of a bf16 run on a GPU: ties by mode off's own numbers, acceptance always."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_engine import DRAFTS, FakeEngine, Flip, greedy_token
from toy_run import STAGE, Runner, encode, of_phase

from nwor_bench.analysis.parity.acceptance import SUMS_EVENT, read_sums
from nwor_bench.analysis.parity.tokens import ParityRule, parity_rule
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.records.cell import Cell, Drafts, ScvMode
from nwor_bench.records.facts import EngineStatus, to_json
from nwor_bench.records.store import RunData
from nwor_bench.records.types import NworMode
from nwor_bench.run.gate.parity import COMPARED, BatchAnswer, ParityGate
from nwor_bench.run.gate.ties import TieCheck

pytestmark = pytest.mark.slow  # whole runs


Change = Callable[[BatchOutput], None]


class GpuEngine(FakeEngine):
    """Runs in bf16 on a GPU; `change` alters what mode stage returns."""

    change: Change | None = None
    method = "strict"

    def generate(self, prompts: Any, sampling: Any, **more: Any) -> BatchOutput:
        output = super().generate(prompts, sampling, **more)
        stage = self.cell is not None and self.cell.nwor_mode is NworMode.STAGE
        if self.change is not None and stage:
            self.change(output)
        return output

    def status(self) -> EngineStatus:
        return super().status().model_copy(update={"rejection_sample_method": self.method})


def gpu_engine(change: Change | None = None, **values: Any) -> GpuEngine:
    engine = GpuEngine(**{"device": "cuda:0", "dtype": "bfloat16", **values})
    engine.change = change
    return engine


def accepted(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Change:
    def apply(output: BatchOutput) -> None:
        counters = output.counters
        moved = change(counters.accepted_per_position)
        object.__setattr__(counters, "accepted_per_position", moved)

    return apply


def one_less(counts: tuple[int, ...]) -> tuple[int, ...]:
    return (*counts[:-1], counts[-1] - 1) if counts[-1] else (*counts[:-2], counts[-2] - 1, 0)


def prefix_in(runner: Runner, block: int, request: int, at: int) -> tuple[int, ...]:
    """Prompt and mode off's first tokens of one request."""
    blocks = (runner.plan.gate, *runner.plan.blocks)
    ids = tuple(encode(blocks[block].prompts)[request])
    for _ in range(at):
        ids = (*ids, greedy_token(ids))
    return ids


def flip(runner: Runner, block: int, request: int, at: int, gap: float) -> None:
    ids = prefix_in(runner, block, request, at)
    runner.engine.flips[ids] = Flip((greedy_token(ids) + 100) % 256, gap)


def ties(run: RunData) -> list[dict[str, Any]]:
    return [event for event in run.events if event["event"] == "ties"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("device", "dtype", "method", "states", "rule"),
    [
        ("cpu", "float32", None, False, ParityRule.EXACT),
        ("cpu", "bfloat16", "standard", False, ParityRule.EXACT),
        ("cuda:0", "float32", "block", False, ParityRule.EXACT),
        ("cuda:0", "bfloat16", "standard", False, ParityRule.EXPLAINED),
        ("cuda:0", "float16", None, False, ParityRule.EXPLAINED),
        ("cuda:0", "bfloat16", "synthetic", False, ParityRule.ACCEPTANCE_ONLY),
        ("cpu", "float32", "synthetic", False, ParityRule.ACCEPTANCE_ONLY),
        ("cuda:0", "float32", "fly", False, ParityRule.LOSSY),
        # Staged states are computed by another kernel than mode off's, on a CPU too.
        ("cpu", "bfloat16", None, True, ParityRule.EXPLAINED),
        ("cpu", "float32", None, True, ParityRule.EXACT),
        ("cuda:0", "bfloat16", None, True, ParityRule.EXPLAINED),
    ],
)
def test_the_rule_of_a_device_and_dtype(
    device: str, dtype: str, method: str | None, states: bool, rule: ParityRule
) -> None:
    assert parity_rule(device, dtype, method, states=states) is rule


def test_a_drafters_tie_leaves_the_cell_valid(folder: Path) -> None:
    """Equal tokens, one draft less accepted."""
    runner = Runner(folder, gpu_engine(accepted(one_less)))
    run = runner.run()
    assert runner.sweep.parity.broken == {}
    assert {b.parity for b in of_phase(run, "gate")} == {"reference", "exact"}
    assert len(of_phase(run, "timed")) == 21


@pytest.mark.parametrize(
    ("dtype", "method", "rule"),
    [
        ("float32", "strict", ParityRule.EXACT),
        ("bfloat16", "synthetic", ParityRule.ACCEPTANCE_ONLY),
    ],
)
def test_in_float32_and_with_synthetic_acceptance_it_must_be_equal(
    folder: Path, dtype: str, method: str, rule: ParityRule
) -> None:
    engine = gpu_engine(accepted(one_less), dtype=dtype)
    engine.method = method
    runner = Runner(folder, engine)
    runner.run()
    assert runner.sweep.parity.rule is rule
    assert {cell.nwor_mode for cell in runner.sweep.parity.broken} == {NworMode.STAGE}


def test_synthetic_draft_counts_must_give_equal_lengths() -> None:
    """They accept other numbers of drafts, and other tokens."""
    status = GpuEngine(device="cuda:0", dtype="bfloat16").status()
    status = status.model_copy(update={"rejection_sample_method": "synthetic"})
    gate = ParityGate(status, encode, Mock(), True, lambda event: None, by_drafts=True)
    cell = Cell("tiny", NworMode.OFF, ScvMode.OFF, Drafts(0))

    def answer(accepted: int, *tokens: int) -> BatchAnswer:
        record: Any = SimpleNamespace(cell=cell, vllm_accepted_per_position=(accepted,))
        return BatchAnswer(record, (tokens,))

    block: Any = None
    assert gate.interleaved_difference(answer(5, 1, 2, 3), answer(0, 4, 5, 6), block) is None
    assert gate.interleaved_difference(answer(5, 1, 2), answer(0, 4, 5, 6), block) is not None
    assert "per-position" not in str(gate.facts().compared)


@dataclass(frozen=True)
class Accepted:
    """A batch's record as far as synthetic acceptance and the sums of a cell need it."""

    cell: Cell
    vllm_accepted_per_position: tuple[int, ...]
    vllm_num_drafts: int = 9
    vllm_draft_tokens: int = 18
    parity: str | None = None
    first_mismatch: str | None = None
    phase: str = "gate"
    block: int = 0
    batch: int = 1


@pytest.mark.parametrize(("counts", "parity"), [((5, 3), "acceptance only"), ((5, 2), "INVALID")])
def test_a_staged_count_must_accept_as_many_as_the_same_count_in_mode_off(
    counts: tuple[int, int], parity: str
) -> None:
    """Other draft counts accept other numbers; a staged one has the windows of its twin."""
    status = GpuEngine(device="cuda:0", dtype="bfloat16").status()
    status = status.model_copy(update={"rejection_sample_method": "synthetic"})
    gate = ParityGate(status, encode, Mock(), True, lambda event: None, by_drafts=True)
    zero, two = (Cell("tiny", NworMode.OFF, ScvMode.OFF, Drafts(k)) for k in (0, 2))
    staged = replace(two, nwor_mode=NworMode.STAGE)

    def answer(cell: Cell, *accepted: int) -> BatchAnswer:
        record: Any = Accepted(cell, accepted)
        return BatchAnswer(record, ((1, 2, 3),))

    block: Any = None
    stock = gate.check(two, answer(two, 5, 3), answer(zero), block)
    found = gate.check(staged, answer(staged, *counts), stock, block)
    assert stock.record.parity == "acceptance only"
    assert found.record.parity == parity


@pytest.mark.parametrize("by_drafts", [False, True])
def test_a_lossy_method_breaks_no_cell_by_its_tokens(by_drafts: bool) -> None:
    status = GpuEngine(device="cuda:0", dtype="bfloat16").status()
    status = status.model_copy(update={"rejection_sample_method": "fly"})
    gate = ParityGate(status, encode, Mock(), False, lambda event: None, by_drafts=by_drafts)
    cell = Cell("tiny", NworMode.STAGE, ScvMode.OFF)
    record: Any = Accepted(cell, (5, 3))
    reference = BatchAnswer(record, ((1, 2, 3),))
    block: Any = None
    found = gate.check(cell, BatchAnswer(record, ((1, 7),)), reference, block)
    assert found.record.parity == "lossy"
    assert gate.broken == {}


@pytest.mark.parametrize("at", [None, 7])
def test_other_acceptance_is_invalid_beside_a_tie_too(folder: Path, at: int | None) -> None:
    lost = accepted(lambda counts: (0,) * DRAFTS)
    runner = Runner(folder, gpu_engine(lost), requests=8)
    if at is not None:
        flip(runner, 0, 0, at, gap=0.03)
    run = runner.run()
    assert {cell.nwor_mode for cell in runner.sweep.parity.broken} == {NworMode.STAGE}
    assert "accepted per position: draft 1 0 of 24" in runner.sweep.parity.broken[STAGE]
    assert STAGE not in {batch.cell for batch in of_phase(run, "timed")}
    assert bool(ties(run)) is (at is not None)


def test_a_tie_is_explained_and_written_down(folder: Path) -> None:
    runner = Runner(folder, gpu_engine())
    flip(runner, 0, 1, 3, gap=0.03)
    run = runner.run()
    gate = {batch.cell: batch for batch in of_phase(run, "gate")}
    assert gate[STAGE].parity == "explained"
    assert "1 of 2 requests differ; 1 differing tokens checked" in str(gate[STAGE].first_mismatch)
    events = ties(run)
    assert [(e["phase"], e["nwor_mode"]) for e in events] == [("gate", "stage")] * 4
    assert {(e["differences"], e["rounds"], e["tokens_compared"], e["tokens"]) for e in events} == {
        (1, 1, 16, 16)
    }
    facts = runner.sweep.parity.facts()
    assert facts.rule == "explained"
    assert facts.compared == COMPARED[ParityRule.EXPLAINED]
    found = facts.ties
    assert (found["differences_judged"], found["continuation_batches"]) == (3, 3)
    assert found["judging_s"] > 0
    assert (found["error_positions"], found["tokens_compared"]) == (16, 48)
    assert found["allowance_nats"] == pytest.approx(4 * found["error_rms_nats"])
    assert 0 < found["differences_expected"] <= 3 / 2  # one near-tie in each of three cells
    assert 0 < found["largest_gap_nats"] < found["allowance_nats"]
    json.dumps(to_json(facts))


def test_without_a_difference_nothing_is_asked(folder: Path) -> None:
    engine = gpu_engine()
    runner = Runner(folder, engine)
    runner.run()
    assert engine.decoded == []
    assert runner.sweep.parity.facts().ties is None


def test_a_second_difference_that_is_no_tie_makes_the_cell_invalid(folder: Path) -> None:
    runner = Runner(folder, gpu_engine())
    flip(runner, 0, 1, 3, gap=0.03)
    flip(runner, 0, 1, 6, gap=2.0)
    run = runner.run()
    assert "request 1, output token 6" in runner.sweep.parity.broken[STAGE]
    assert {e["parity"] for e in ties(run)} == {"INVALID"}
    assert STAGE not in {batch.cell for batch in of_phase(run, "timed")}


def test_a_timed_block_is_judged_by_first_differences(folder: Path) -> None:
    runner = Runner(folder, gpu_engine())
    flip(runner, 1, 0, 2, gap=0.03)
    flip(runner, 2, 1, 5, gap=2.0)
    run = runner.run()
    stored = [(e["block"], e["parity"], e["rounds"]) for e in ties(run)]
    assert stored == [(1, "explained", 0)] * 3 + [(2, "INVALID", 0)] * 3
    assert [b.block for b in of_phase(run, "timed") if b.cell == STAGE] == [1, 2]
    assert "request 1, output token 5" in runner.sweep.parity.broken[STAGE]
    assert {e["block"] for e in run.events if e["event"] == "parity_broken"} == {2}


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_a_length_that_differs_is_no_tie(folder: Path, ignore_eos: bool) -> None:
    def shorter(output: BatchOutput) -> None:
        first, *rest = output.token_ids
        object.__setattr__(output, "token_ids", (first[:-1], *rest))

    runner = Runner(folder, gpu_engine(shorter), ignore_eos=ignore_eos)
    runner.run()
    text = runner.sweep.parity.broken[STAGE]
    words = "output lengths [7, 8], [8, 8]" if ignore_eos else "request 0 ends after 7 output"
    assert words in text


def test_measured_batches_are_the_planned_ones_whatever_is_judged(folder: Path) -> None:
    """What the tie check asks is in no record, and each cell's modes are set for its own batch."""
    runner = Runner(folder, gpu_engine())
    flip(runner, 0, 1, 3, gap=0.03)
    flip(runner, 1, 0, 2, gap=0.03)
    run = runner.run()
    ran = [batch.cell for batch in run.batches]
    assert [call.cell for call in runner.engine.calls] == ran
    assert len(ran) == runner.plan.num_batches


def test_ties_that_are_all_far_apart_make_a_cell_invalid(folder: Path) -> None:
    """Each is within 4 error scales (0.06 nats each way), together they are not sound."""
    runner = Runner(folder, gpu_engine(), requests=8, max_new_tokens=16)
    for request in range(8):
        flip(runner, 0, request, 5 + request, gap=0.15)
    runner.run()
    assert "too many together: 8 have a gap" in runner.sweep.parity.broken[STAGE]


def test_draft_counts_may_not_have_too_many_ties_either() -> None:
    """They accept other numbers of drafts than the reference, so acceptance is not compared."""
    engine = gpu_engine(dtype="bfloat16")
    prompts = [[n, n + 1] for n in range(8)]
    for number, prompt in enumerate(prompts):
        ids = tuple(prompt)
        for _ in range(5 + number):
            ids = (*ids, greedy_token(ids))
        engine.flips[ids] = Flip((greedy_token(ids) + 100) % 256, 0.15)
    zero, two = (Cell("tiny", NworMode.OFF, ScvMode.OFF, Drafts(k)) for k in (0, 2))
    staged = replace(two, nwor_mode=NworMode.STAGE)
    check = TieCheck(engine, zero, lambda: prompts, 16, ignore_eos=True)
    events: list[dict[str, Any]] = []
    gate = ParityGate(engine.status(), encode, check, True, events.append, by_drafts=True)
    block: Any = SimpleNamespace(token_ids=lambda _: prompts)

    def answer(cell: Cell) -> BatchAnswer:
        engine.set_modes(cell)
        outputs = engine.decode_greedily(prompts, [16] * 8, ignore_eos=True)
        record: Any = Accepted(cell, (5, 3))
        return BatchAnswer(record, tuple(output.token_ids for output in outputs))

    found = gate.check(staged, answer(staged), answer(zero), block)
    assert found.record.parity == "INVALID"
    assert "too many together" in str(found.record.first_mismatch)
    (sums,) = [event for event in events if event["event"] == SUMS_EVENT]
    assert read_sums(json.loads(json.dumps(sums))).acceptance is None


def test_a_prompt_of_several_blocks_counts_its_tie_once(folder: Path) -> None:
    runner = Runner(folder, gpu_engine(), requests=2, batches=40)
    ids = prefix_in(runner, 0, 1, 3)
    runner.engine.flips[ids] = Flip((greedy_token(ids) + 100) % 256, 0.2)
    shared = [b for b in runner.plan.blocks if runner.plan.gate.prompts[1] in b.prompts]
    run = runner.run()
    assert len(ties(run)) == 3 * (1 + len(shared)) + 1  # the gate's last batch
    assert len(shared) >= 3
    assert runner.sweep.parity.broken == {}
