"""Real vLLM with one state slot a request: every window is staged, the answers are stock's.

As in `test_staged_states.py`, a difference of tokens is a fault unless they are a tie.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from checklist_tools import Answers, ask, check_counts, check_partial, greedy
from engine_tools import tiny_spec, total_of, worker_of
from test_staged_states import (
    PROMPTS,
    WITHOUT_PREFIX_CACHE,
    check_states,
    difference,
    hook_of,
    one_by_one,
    states_of,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import ExitCode
from nwor_bench.models.pairs import ResolvedPair, resolve_pair
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

AGAINST = {"additional_config": {"nwor_state_slots": 1}}


def specs(**changes: Any) -> tuple[RunSpec, RunSpec]:
    """Specs of an engine with a slot for each draft, and of one with a single slot."""
    usual = {"requests": 4, "kv_cache_gib": 0.1, "max_model_len": 256}
    arguments = json.dumps({**WITHOUT_PREFIX_CACHE, **changes.pop("engine_args", {})})
    spec = tiny_spec(**usual, engine_args=arguments, against=json.dumps(AGAINST), **changes)
    return spec.engine_specs[None], spec.engine_specs[Arguments.of(AGAINST)]


INTERRUPT = pytest.mark.parametrize(
    "interrupt",
    [
        pytest.param(False, id="end and start", marks=pytest.mark.long),
        pytest.param(True, id="preempted"),
    ],
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ResolvedPair:
    return resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def stock(start_engine: Callable[..., VllmEngine], pair: ResolvedPair) -> VllmEngine:
    return start_engine(pair, specs()[0])


@pytest.fixture(scope="module")
def expected(stock: VllmEngine) -> Answers:
    """Stock's; some drafts are accepted and some are not."""
    found = ask(stock, "off", PROMPTS, greedy())
    check_partial(found)
    return found


@pytest.fixture(scope="module")
def single(
    start_engine: Callable[..., VllmEngine], pair: ResolvedPair, expected: Answers
) -> VllmEngine:
    """Started last: vLLM's counters are those of its last engine."""
    return start_engine(pair, specs()[1])


def test_a_request_reserves_one_slot(stock: VllmEngine, single: VllmEngine) -> None:
    assert [engine.status().state_slots for engine in (stock, single)] == [5, 1]
    for engine, slots in ((stock, 5), (single, 1)):
        runner = worker_of(engine).model_runner
        tables = runner.input_batch.block_table.block_tables
        names = set(hook_of(engine).layers.recurrent)
        for table, group in zip(tables, runner.kv_cache_config.kv_cache_groups, strict=True):
            if names.intersection(group.layer_names):
                assert table.block_table.np.shape[1] == slots
    assert hook_of(single).nwor_mode is NworMode.STAGE  # before anybody sets a mode


@pytest.mark.parametrize("scv", ["off", pytest.param("graph", marks=pytest.mark.long)])
def test_the_answers_are_those_of_stock(
    stock: VllmEngine, single: VllmEngine, expected: Answers, scv: str
) -> None:
    for _ in range(2):
        staged = ask(single, "stage", PROMPTS, greedy(), scv=scv)
        check_counts(single, staged)
        check_states(single, staged.windows, staged.total("draft_tokens"))
        assert difference(stock, staged.tokens, expected.tokens) is None
    assert staged.tokens == ask(stock, "stage", PROMPTS, greedy()).tokens  # the same arithmetic


def check_each(
    stock: VllmEngine, expected: Answers, answers: Sequence[Sequence[int]]
) -> str | None:
    """The first difference of requests that repeat PROMPTS; None without one."""
    for request, tokens in enumerate(answers):
        prompt = request % len(PROMPTS)
        ours: list[Sequence[int]] = [[]] * len(PROMPTS)
        theirs: list[Sequence[int]] = [[]] * len(PROMPTS)
        ours[prompt], theirs[prompt] = tokens, expected.tokens[prompt][: len(tokens)]
        found = difference(stock, ours, theirs)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize("beside", ["stage", "direct"], ids=["K/V staged", "K/V direct"])
@INTERRUPT
def test_requests_come_and_go(
    stock: VllmEngine,
    single: VllmEngine,
    expected: Answers,
    interrupt: bool,
    beside: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of windows beside a prefill are staged, whatever becomes of their K/V."""
    monkeypatch.setattr(hook_of(single), "_stages_beside_prefill", beside == "stage")
    answers = one_by_one(single, "stage", interrupt)
    windows = windows_of(single._rpc("nwor_drain")["windows"])
    reasons = {window.fallback_reason for window in windows}
    assert reasons == ({None} if beside == "stage" else {None, "beside_prefill"})
    assert {window.states_reason for window in windows} == {None}
    assert total_of(windows, "states_avoided") == 3 * total_of(windows, "draft_tokens") > 0
    assert check_each(stock, expected, answers) is None


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
        mixed, a, b, log_a, _, state, indices, accepted, bounds = inputs
        copies = [each.clone() for each in (mixed, a, b, indices, accepted, bounds)]
        mixed, a, b, indices, accepted, bounds = copies
        slots = indices[:SAMPLE].gather(1, accepted[:SAMPLE, None].long() - 1).flatten().long()
        first = state[slots.clamp(min=0)]
        self._verify(inputs, out, records, **named)
        self._calls[self._numbers[id(log_a)]] = StateCall(
            mixed, a, b, None, indices, accepted, bounds, first, first, mixed, out.clone()
        )

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
    single: VllmEngine, interrupt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = StockElsewhere(states_of(single), monkeypatch)
    one_by_one(single, "stage", interrupt)
    assert min(len(found.alone), len(found.beside)) >= 6  # two windows of three layers
    assert max(found.alone + found.beside) < 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda counts: counts.roll(1), id="another row's"),
        pytest.param(torch.ones_like, id="one token", marks=pytest.mark.long),
    ],
)
def test_a_wrong_commit_beside_a_prefill_is_seen(
    single: VllmEngine,
    fault: Callable[[torch.Tensor], torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States of other steps are right."""
    found = StockElsewhere(states_of(single), monkeypatch, fault)
    one_by_one(single, "stage", interrupt=False)
    assert max(found.alone) < 1 < max(found.beside)


@pytest.mark.long
@pytest.mark.usefixtures("figures_left_out", "environment_given_back")
def test_a_sweep_compares_it_with_stock(tmp_path: Path) -> None:
    spec = tiny_spec(
        against=json.dumps(AGAINST), requests=3, batches=3, warmup=1, max_warmup=1,
        block_size=None, max_new_tokens=24, kv_cache_gib=0.1,
        scv_modes="off", engine_args=json.dumps(WITHOUT_PREFIX_CACHE),
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
    assert len(set(cells.windows)) == 1  # as many requests at a time


def raw_tables(single: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: metadata keep their one column."""
    groups = [group for groups in worker_of(single).model_runner.attn_groups for group in groups]
    builders = [builder for group in groups for builder in group.metadata_builders]
    wrapped = [builder for builder in builders if "build" in vars(builder)]
    assert wrapped
    for builder in wrapped:
        monkeypatch.setattr(builder, "build", type(builder).build.__get__(builder))


@pytest.mark.parametrize(
    "fault",
    [
        "columns",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("left to stock", "never committed")),
    ],
)
def test_a_fault_is_seen(
    stock: VllmEngine,
    single: VllmEngine,
    expected: Answers,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tests above rest on."""
    states = states_of(single)
    if fault == "columns":
        raw_tables(single, monkeypatch)
    elif fault == "left to stock":
        monkeypatch.setattr(states, "stages", lambda metadata: False)
        monkeypatch.setattr(states, "one_slot", False)
    else:
        monkeypatch.setattr(states, "_commit_of", lambda *given: lambda *counts: None)
    answers = ask(single, "stage", PROMPTS, greedy())
    monkeypatch.undo()
    states.drop()
    assert difference(stock, answers.tokens, expected.tokens) is not None
