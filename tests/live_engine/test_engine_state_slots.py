"""Real vLLM with one state slot a request, on either runner: every window is staged, the answers
are stock's. A difference of tokens is a fault unless they are a tie."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from checklist_tools import ask, check_counts, greedy
from engine_tools import EAGER, close, prompts_of, tiny_spec, total_of, worker_of
from planted_states import RING_PLANTS, check_case
from state_tools import (
    AGAINST,
    ENGINES,
    PROMPTS,
    check_states,
    engine_case,
    engines,
    fault_of,
    hook_of,
    one_by_one,
    states_of,
    states_spec,
    stock_answers,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import GreedyOutput
from nwor_bench.errors import EngineError, ExitCode
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.observe.state_checks import check_state
from nwor_bench.plugin.state_layers import SAMPLE, StateCall
from nwor_bench.plugin.states import StateOutcome, WindowStates
from nwor_bench.records.cell import Arguments
from nwor_bench.records.types import NworMode
from nwor_bench.records.window import windows_of
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.run_spec import RunSpec
from nwor_kernels.gated_delta.records import WindowInputs

pytestmark = pytest.mark.engine

Start = Callable[..., VllmEngine]

ON_CPU = engines("cpu")
WITH_GATE = engines("cpu", "eager-float32", "full-float32", "full-bfloat16")
INTERRUPT = pytest.mark.parametrize(
    "interrupt",
    [
        pytest.param(False, id="end and start", marks=pytest.mark.long),
        pytest.param(True, id="preempted"),
    ],
)


def specs(name: str, **changes: Any) -> tuple[RunSpec, RunSpec]:
    """Specs of an engine with a slot for each draft, and of one with a single slot."""
    spec = states_spec(name, against=json.dumps(AGAINST), **changes)
    return spec.engine_specs[None], spec.engine_specs[Arguments.of(AGAINST)]


TO_THE_END = [*prompts_of([236]), *PROMPTS[:3]], [20, 40, 40, 40]
"""Prompts and their tokens: the first context ends beside others' windows, where its last row may
have no drafts."""


def drop_drafts(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every third step the scheduler has no drafts for one request, another each time."""
    scheduler: Any = engine._llm.llm_engine.engine_core.engine_core.scheduler
    schedule, steps = scheduler.schedule, count()

    def schedule_without(*given: Any, **named: Any) -> Any:
        turn, running = next(steps), scheduler.running
        if running and turn % 3 == 2:
            running[turn // 3 % len(running)].spec_token_ids = []
        return schedule(*given, **named)

    monkeypatch.setattr(scheduler, "schedule", schedule_without)


@dataclass(frozen=True)
class Stock:
    """An engine with a slot for each draft, closed before the other one starts."""

    told: tuple[GreedyOutput, ...]
    told_to_the_end: tuple[GreedyOutput, ...]
    """Answers `TO_THE_END`."""
    staged: list[tuple[int, ...]]
    """Answers in mode stage."""
    slots: int | None
    table_columns: set[int]


def on_gpu(engine: VllmEngine) -> bool:
    return hook_of(engine).name == "V2"


def table_columns(engine: VllmEngine) -> set[int]:
    """Columns of the block tables of groups with recurrent layers."""
    runner = worker_of(engine).model_runner
    names = set(hook_of(engine).layers.recurrent)
    groups = runner.kv_cache_config.kv_cache_groups
    if on_gpu(engine):
        return set()
    tables = zip(runner.input_batch.block_table.block_tables, groups, strict=True)
    return {
        table.block_table.np.shape[1]
        for table, group in tables
        if names.intersection(group.layer_names)
    }


@pytest.fixture(scope="module")
def stocks() -> dict[VllmEngine, Stock]:
    """What stock said, by the engine with a single slot that started behind it."""
    return {}


@pytest.fixture(scope="module", params=[engine_case(name) for name in ENGINES])
def engine(
    request: pytest.FixtureRequest,
    stocks: dict[VllmEngine, Stock],
    start_engine: Start,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmEngine]:
    """One engine with one slot after another; a GPU's process holds one at a time."""
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    stock_spec, single_spec = specs(request.param)
    first = start_engine(pair, stock_spec)
    staged = ask(first, "stage", PROMPTS, greedy()).tokens
    told = stock_answers(first), first.decode_greedily(*TO_THE_END, ignore_eos=True, top=20)
    stock = Stock(*told, staged, first.status().state_slots, table_columns(first))
    close(first)
    made = start_engine(pair, single_spec)
    stocks[made] = stock
    yield made
    close(made)


@pytest.fixture
def stock(engine: VllmEngine, stocks: dict[VllmEngine, Stock]) -> Stock:
    return stocks[engine]


@ON_CPU
def test_a_request_reserves_one_slot(engine: VllmEngine, stock: Stock) -> None:
    assert (stock.slots, stock.table_columns) == (5, {5})
    assert (engine.status().state_slots, table_columns(engine)) == (1, {1})
    assert hook_of(engine).nwor_mode is NworMode.STAGE  # before anybody sets a mode


@pytest.mark.parametrize(
    "scv", ["off", *(pytest.param(n, marks=pytest.mark.long) for n in ("graph", "adaptive"))]
)
def test_the_answers_are_those_of_stock(engine: VllmEngine, stock: Stock, scv: str) -> None:
    status = engine.status()
    assert (status.state_slots, status.states_unavailable, status.state_layers) == (1, None, 3)
    rings = states_of(engine).rings
    for _ in range(2):
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
        check_counts(engine, staged)
        check_states(engine, staged.windows, staged.total("draft_tokens"))
        assert fault_of(staged.tokens, stock.told) is None
        assert int(rings.records.cursors[1:, 0].count_nonzero()) >= 2
    assert staged.tokens == stock.staged or on_gpu(engine)  # the same arithmetic


def test_a_row_without_drafts_beside_windows(
    engine: VllmEngine, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock reads its state, which was written first."""
    hook, rings = hook_of(engine), states_of(engine).rings
    begin, live = hook._begin_states, list[tuple[int, int]]()

    def rows_of(req_id: str) -> int:
        return int(rings.records.cursors[rings._ring_of.get(req_id, 0), 0])

    def begin_states(step: Any, req_ids: Any, *given: Any) -> None:
        drafts = step.scheduler_output.scheduled_spec_decode_tokens
        read = [req_id for req_id in req_ids if not drafts.get(req_id)] if drafts else []
        before = [rows_of(req_id) for req_id in read]
        begin(step, req_ids, *given)
        live.extend(zip(before, map(rows_of, read), strict=True))

    monkeypatch.setattr(hook, "_begin_states", begin_states)
    prompts, lengths = TO_THE_END
    if on_gpu(engine):  # vLLM's CPU kernel has no window shorter than what the last one accepted
        drop_drafts(engine, monkeypatch)
    found = ask(engine, "stage", prompts, greedy())
    assert [len(tokens) for tokens in found.tokens] == lengths
    assert fault_of(found.tokens, stock.told_to_the_end) is None
    assert live, "every row beside a window had drafts"
    assert max(before for before, _ in live) > 0
    assert not any(after for _, after in live)


@pytest.mark.parametrize("beside", ["stage", "direct"], ids=["K/V staged", "K/V direct"])
@INTERRUPT
def test_requests_come_and_go(
    engine: VllmEngine,
    stock: Stock,
    interrupt: bool,
    beside: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of windows beside a prefill are staged, whatever becomes of their K/V."""
    monkeypatch.setattr(hook_of(engine), "_stages_beside_prefill", beside == "stage")
    assert fault_of(one_by_one(engine, interrupt), stock.told) is None
    windows = windows_of(engine._rpc("nwor_drain")["windows"])
    reasons = {window.fallback_reason for window in windows}
    assert reasons == ({None} if beside == "stage" else {None, "beside_prefill"}) or on_gpu(engine)
    assert {window.states_reason for window in windows} == {None}
    assert total_of(windows, "states_avoided") == 3 * total_of(windows, "draft_tokens") > 0


@pytest.mark.parametrize(
    "case", ["sound stage", *(pytest.param(n, marks=pytest.mark.long) for n in RING_PLANTS)]
)
@WITH_GATE
def test_the_local_gate_sees_faults_of_rings(engine: VllmEngine, case: str) -> None:
    if case != "ring not zeroed":
        check_case(engine, PROMPTS, case, layers=3)


@pytest.mark.long
@WITH_GATE
@pytest.mark.parametrize("case", RING_PLANTS)
def test_answers_and_the_debug_check_show_faults_of_rings(
    engine: VllmEngine, stock: Stock, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests start beside others. On an H100 the answers hid some of these faults behind ties:
    there the gate shows them, or the check."""
    with torch.inference_mode(), RING_PLANTS[case](states_of(engine)):
        found = DebugCheck(engine, monkeypatch)
        answers = one_by_one(engine, interrupt=False)
    assert bool(found.errors) == (case != "flush skipped")
    if fault_of(answers, stock.told) is None:
        assert on_gpu(engine)
        if not found.errors:
            check_case(engine, PROMPTS, case, layers=3)


class DebugCheck:
    """Turns VLLM_NWOR_DEBUG's check of the rings on, and keeps what it finds."""

    def __init__(self, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch):
        self.errors: list[str] = []
        self.steps = 0
        self._check = states_of(engine).rings.check
        monkeypatch.setattr(hook_of(engine).late, "debug", True)
        monkeypatch.setattr(states_of(engine).rings, "check", self.check)

    def check(self, *given: Any) -> None:
        self.steps += 1
        try:
            self._check(*given)
        except EngineError as error:
            self.errors.append(str(error))


@pytest.mark.long
@WITH_GATE
@INTERRUPT
def test_live_rows_follow_vllms_tokens(
    engine: VllmEngine, interrupt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = DebugCheck(engine, monkeypatch)
    one_by_one(engine, interrupt)
    assert (found.errors, found.steps > 10) == ([], True)


@WITH_GATE
def test_states_are_made_current_for_stock(
    engine: VllmEngine, stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Done before every third window here, which goes on as before."""
    hook, states, steps, written = hook_of(engine), states_of(engine), count(), list[int]()
    rings, begin, make_current = states.rings, hook._begin_states, states.make_current
    assert rings is not None
    cursors = rings.records.cursors

    def begin_states(step: Any, req_ids: Any, tables: Any, computed: Any) -> None:
        begin(step, req_ids, tables, computed)
        if next(steps) % 3 == 2:
            states.make_current(len(req_ids), tables)

    def checked(requests: int, tables: Any) -> None:
        own = rings.records.of_row[:requests].long()
        slots = [tables[layer.cache_group][:requests, 0].long() for layer in states.layers]
        due = [states.current(n, own_slots, own) for n, own_slots in enumerate(slots)]
        written.append(int((cursors[own, 0] > 0).sum()))
        make_current(requests, tables)
        assert not bool(cursors[own, 0].any())
        for layer, own_slots, state in zip(states.layers, slots, due, strict=True):
            close = {"rtol": 1e-2, "atol": 1e-3} if layer.state.dtype is torch.bfloat16 else {}
            torch.testing.assert_close(layer.state[own_slots].float(), state, **close)

    monkeypatch.setattr(hook, "_begin_states", begin_states)
    monkeypatch.setattr(states, "make_current", checked)
    answers = ask(engine, "stage", PROMPTS, greedy())
    assert fault_of(answers.tokens, stock.told) is None
    assert max(written) > 1


class StockElsewhere:
    """Computes each layer's window by vLLM's kernel too, with a slot for each token elsewhere, and
    keeps how far the committed states and outputs are apart, over what is allowed.

    Args:
        counts: changes the counts of a commit beside a prefill: a planted fault.
    """

    def __init__(
        self,
        states: WindowStates,
        monkeypatch: pytest.MonkeyPatch,
        counts: Callable[[torch.Tensor], torch.Tensor] = lambda counts: counts,
    ):
        self.alone: list[float] = []
        self.beside: list[float] = []
        """Errors of windows beside a prefill."""
        self._states, self._counts = states, counts
        self._verify, self._commit = states._kernels.verify, states.commit
        self._calls: dict[int, StateCall] = {}
        self._numbers = {id(each.layer.A_log): n for n, each in enumerate(states.layers)}
        kernels = states._kernels._replace(verify=self.verify)
        monkeypatch.setattr(states, "_kernels", kernels)
        monkeypatch.setattr(states, "commit", self.commit)

    def verify(self, inputs: WindowInputs, out: Any, records: Any, **named: Any) -> None:
        """Note what a layer is given, and what it returns."""
        mixed, a, b, log_a, _, _, indices, accepted, bounds = inputs
        copies = [each.clone() for each in (mixed, a, b, indices, accepted, bounds)]
        mixed, a, b, indices, accepted, bounds = copies
        slots = indices[:SAMPLE].gather(1, accepted[:SAMPLE, None].long() - 1).flatten().long()
        number = self._numbers[id(log_a)]
        current = partial(self._states.current, number)
        rings = named["rings"].of_row[: len(slots)].clone() if "rings" in named else None
        first = current(slots.clamp(min=0), rings)
        self._verify(inputs, out, records, **named)
        self._calls[number] = StateCall(
            mixed, a, b, None, indices, accepted, bounds, first, first, mixed, out.clone(),
            rings, current,
        )  # fmt: skip

    def commit(self, counts: torch.Tensor) -> StateOutcome:
        """Commit, and compare the states."""
        masks = self._states._windows
        outcome = self._commit(counts if masks is None else self._counts(counts))
        rows = counts if masks is None else counts[masks]
        calls, self._calls = self._calls, {}
        for number, call in calls.items():
            layer = self._states.layers[number]
            state = check_state(layer, call, rows.tolist(), is_control=False)
            apart = state["error"] / state["allowed"]
            told = max(apart, state["output_error"] / state["output_allowed"])
            (self.alone if masks is None else self.beside).append(told)
        return outcome


@INTERRUPT
def test_states_and_outputs_are_those_of_vllms_kernel(
    engine: VllmEngine, interrupt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = StockElsewhere(states_of(engine), monkeypatch)
    one_by_one(engine, interrupt)
    eager = [found.beside] if on_gpu(engine) else [found.alone, found.beside]
    assert min(map(len, eager)) >= 6  # two windows of three layers
    assert max(found.alone + found.beside) < 1


@ON_CPU
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda counts: counts.roll(1), id="another row's"),
        pytest.param(torch.ones_like, id="one token", marks=pytest.mark.long),
    ],
)
def test_a_wrong_commit_beside_a_prefill_is_seen(
    engine: VllmEngine,
    fault: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of other steps are right."""
    found = StockElsewhere(states_of(engine), monkeypatch, fault)
    one_by_one(engine, interrupt=False)
    assert max(found.alone) < 1 < max(found.beside)


@pytest.mark.long
@pytest.mark.usefixtures("figures_left_out", "environment_given_back")
def test_a_sweep_compares_it_with_stock(tmp_path: Path) -> None:
    spec = tiny_spec(
        against=json.dumps(AGAINST), requests=3, batches=3, warmup=1, max_warmup=1,
        block_size=None, max_new_tokens=24, kv_cache_gib=0.1,
        scv_modes="off", engine_args=json.dumps({**EAGER, "enable_prefix_caching": False}),
    )  # fmt: skip
    code = run_one(spec, PairChoice(pair="tiny-states-mtp"), RunOptions(output=tmp_path / "run"))
    assert code is ExitCode.OK
    cells = pd.read_csv(tmp_path / "run/cells.csv", keep_default_na=False).set_index("arm")
    arm = str(Arguments.of(AGAINST))
    assert set(cells.loc[[arm, "A/A"]].parity) <= {"exact", "ties"}
    own = cells.loc[arm]
    assert (own.nwor_mode, own.nwor_fallback_count) == ("stage", 0)
    assert own.nwor_total_staged == own.draft_tokens > 0
    assert own.nwor_total_committed == own.accepted_tokens
    assert own.nwor_total_staged == own.nwor_total_committed + own.nwor_total_rejected
    engine = json.loads((tmp_path / "run/run.json").read_text())["engine"]
    reserved = [(each["state_slots"], each["state_reserved_bytes"])
                for each in (engine, engine["arms"][arm])]  # fmt: skip
    assert reserved == [(5, 5 * reserved[1][1]), (1, reserved[0][1] // 5)]
    report = (tmp_path / "run/report.md").read_text()
    assert "Recurrent and convolution states of 3 layers are stock's" in report
    assert "A request reserves 5 state slots (" in report
    # As many requests at a time: with two instead of three, half as many windows again. Behind a
    # tie other drafts are accepted.
    assert cells.windows.max() - cells.windows.min() <= 2


def raw_tables(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: metadata keep their one column."""
    groups = [group for groups in worker_of(engine).model_runner.attn_groups for group in groups]
    builders = [builder for group in groups for builder in group.metadata_builders]
    wrapped = [builder for builder in builders if "build" in vars(builder)]
    assert wrapped
    for builder in wrapped:
        monkeypatch.setattr(builder, "build", type(builder).build.__get__(builder))


@ON_CPU
@pytest.mark.parametrize(
    "fault",
    [
        "columns",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("left to stock", "never committed")),
    ],
)
def test_a_fault_is_seen(
    engine: VllmEngine, stock: Stock, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above rest on."""
    states = states_of(engine)
    if fault == "columns":
        raw_tables(engine, monkeypatch)
    elif fault == "left to stock":
        monkeypatch.setattr(states, "stages", lambda *given: False)
        monkeypatch.setattr(states, "commit", partial(WindowStates.commit, states))
    else:
        monkeypatch.setattr(states, "_commit_of", lambda *given: lambda *counts: None)
    answers = ask(engine, "stage", PROMPTS, greedy())
    monkeypatch.undo()
    states.drop()
    assert fault_of(answers.tokens, stock.told) is not None
