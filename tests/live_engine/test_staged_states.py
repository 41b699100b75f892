"""Real vLLM with gated delta nets, on either runner: their states are staged, the answers stay
those of `off`, and the gates, local and end to end, pass sound cells and no planted fault."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checklist_tools import ask, check_counts, greedy
from engine_tools import close, run_interleaved, total_of, worker_of
from planted_faults import STATE_FAULTS, Fault
from planted_gate import SOUND, Outcomes, run_gate
from planted_states import CASES, END_TO_END, check_case, check_end_to_end
from state_tools import (
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
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.states import StateOutcome
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode
from nwor_bench.records.window import windows_of

pytestmark = pytest.mark.engine

Told = tuple[GreedyOutput, ...]

ON_CPU = engines("cpu")
GATED = engines("cpu", "eager-float32", "full-float32", "full-bfloat16")


@pytest.fixture(scope="module", params=map(engine_case, ENGINES))
def engine(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmEngine]:
    """One engine after another; a GPU's process holds one at a time."""
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    made = start_engine(pair, states_spec(request.param))
    yield made
    close(made)


@pytest.fixture(scope="module")
def told(engine: VllmEngine) -> Told:
    return stock_answers(engine)


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: VllmEngine) -> Iterator[None]:
    yield
    assert hook_of(engine).window is not None
    assert states_of(engine)._staged == []


@ON_CPU
def test_the_status_says_that_states_are_staged(engine: VllmEngine) -> None:
    status = engine.status()
    assert (status.staging_unavailable, status.states_unavailable) == (None, None)
    assert status.staged_parts == "K/V and states"
    heads, width, layers, window = 4, 128, 3, 5
    bits = 4 if torch.cpu._is_avx512_bf16_supported() else 2
    assert status.state_bytes == layers * heads * width * width * bits
    token = 2 * 2 * width + 4 * heads * width + 4 * heads  # k of 2 heads in bfloat16, u and g
    assert status.state_record_token_bytes == layers * token
    assert status.state_record_bytes == layers * token * window * 4


@pytest.mark.parametrize("scv", ["off", "graph", "adaptive"])
def test_staged_states_leave_the_answers(engine: VllmEngine, told: Told, scv: str) -> None:
    staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
    check_counts(engine, staged)
    check_states(engine, staged.windows, staged.total("draft_tokens"))
    assert fault_of(staged.tokens, told) is None


def test_control_writes_every_state(engine: VllmEngine, told: Told) -> None:
    control = ask(engine, "control", PROMPTS, greedy())
    assert fault_of(control.tokens, told) is None
    assert control.total("control_tokens") == control.total("draft_tokens") > 0
    assert control.total("states_committed") == 0


CELLS = (
    *(Cell("tiny", NworMode(nwor), ScvMode.OFF) for nwor in ("off", "stage", "control")),
    Cell("tiny", NworMode.OFF, ScvMode.OFF, AA),
)


@pytest.mark.parametrize("seed", ["a", "c"])
def test_modes_alternate_window_by_window(engine: VllmEngine, told: Told, seed: str) -> None:
    output, windows, _ = run_interleaved(
        engine, PROMPTS, seed=seed, cells=CELLS, untimed=seed == "a"
    )
    assert fault_of(output.token_ids, told) is None
    staged = windows[CELLS[1]]
    check_states(engine, staged, total_of(staged, "draft_tokens"))
    others = [window for cell in CELLS if cell is not CELLS[1] for window in windows[cell]]
    assert others
    assert total_of(others, "states_committed") == 0


@ON_CPU
def test_only_the_committed_state_is_read(
    engine: VllmEngine, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other slot of a window is poisoned behind its commit."""
    states, calls = states_of(engine), []
    commit = states.commit

    def then(num_sampled: torch.Tensor) -> StateOutcome:
        tables = states._collected() if states._staged else None
        outcome = commit(num_sampled)
        for layer in states.layers if tables is not None else ():
            for row, count in enumerate(num_sampled.tolist()):
                slots = tables.indices[layer.group][row].tolist()
                kept = slots.pop(count - 1)
                assert kept not in slots
                layer.state[slots] = float("nan")
            calls.append(outcome.layers)
        return outcome

    monkeypatch.setattr(states, "commit", then)
    answers = ask(engine, "stage", PROMPTS, greedy())
    assert set(calls) == {3}
    assert fault_of(answers.tokens, told) is None


@ON_CPU
def test_a_window_that_falls_back_keeps_its_states(
    engine: VllmEngine, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The K/V of every third window is written directly, by a fault behind the recurrent layers."""
    window, calls = hook_of(engine).window, iter(range(10**9))
    assert window is not None
    stage = window.stage

    def fails(layer: int, key: torch.Tensor, value: torch.Tensor) -> bool:
        if next(calls) % 3 == 1:
            window.abort("stage:planted")
            return False
        return stage(layer, key, value)

    monkeypatch.setattr(window, "stage", fails)
    answers = ask(engine, "stage", PROMPTS, greedy())
    assert answers.fallbacks == {None, "stage:planted"}
    check_states(engine, answers.windows, answers.total("draft_tokens"))
    assert fault_of(answers.tokens, told) is None


@ON_CPU
def test_a_kernel_that_fails_leaves_the_commit_to_torch(
    engine: VllmEngine, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(engine)

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(states, "_kernels", states._kernels._replace(commit=broken))
    monkeypatch.setattr(states, "_commits", {})
    answers = ask(engine, "stage", PROMPTS, greedy(16))
    assert answers.fallbacks == {"commit:states:RuntimeError"}
    assert answers.total("states_committed") > 0
    assert answers.total("staged_tokens") == 0
    assert fault_of(answers.tokens, told) is None


@ON_CPU
@pytest.mark.parametrize("interrupt", [False, True], ids=["end and start", "preempted"])
def test_requests_come_and_go(engine: VllmEngine, told: Told, interrupt: bool) -> None:
    assert fault_of(one_by_one(engine, interrupt), told) is None
    windows = windows_of(engine._rpc("nwor_drain")["windows"])
    reasons = {window.states_reason for window in windows}
    assert None in reasons
    assert reasons <= {None, "beside_prefill"}
    assert total_of(windows, "states_committed") > 0


@GATED
@pytest.mark.parametrize("case", CASES)
def test_the_local_gate_sees_every_fault(engine: VllmEngine, case: str) -> None:
    check_case(engine, PROMPTS, case, layers=3)


@GATED
@pytest.mark.parametrize("case", END_TO_END)
def test_states_are_mode_offs_end_to_end(engine: VllmEngine, case: str) -> None:
    """`test_the_whole_gate_sees_every_planted_fault` has the other faults."""
    check_end_to_end(engine, PROMPTS, case, layers=3)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The column of this file."""
    return Outcomes("cpu-states")


@ON_CPU
@pytest.mark.long
@pytest.mark.parametrize("fault", [None, *(f for f in STATE_FAULTS if "V1" in f.runners)],
                         ids=lambda fault: fault.name if fault else "none")  # fmt: skip
def test_the_whole_gate_sees_every_planted_fault(
    engine: VllmEngine, outcomes: Outcomes, tmp_path: Path, fault: Fault | None
) -> None:
    """Tokens, K/V, states and layers of a plan's cells."""
    plant = fault.plant(worker_of(engine)) if fault else nullcontext()
    for on in (True, False):  # what watches is made here: later tests use it outside of that mode
        engine.kv_cache().watch(on)
    with torch.inference_mode(), plant:
        spec = states_spec("cpu")
        outcome = run_gate(engine, spec, PROMPTS, tmp_path / "run", "tiny-states-mtp")
    assert outcome.staged > 0
    outcomes.add(fault.name if fault else SOUND, outcome)
    assert set(outcome.caught) == (set(fault.cells) if fault else set()), outcome.reasons
    for checks in outcome.caught.values():
        assert fault is None or checks >= fault.sure, outcome.reasons


@ON_CPU
@pytest.mark.long
def test_with_prefix_caching_stock_keeps_the_states(
    start_engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path / "pair")
    spec = states_spec("cpu", requests=2, engine_args={"enable_prefix_caching": True})
    second = start_engine(pair, spec)
    try:
        status = second.status()
        assert status.staging_unavailable is None
        assert (status.state_layers, status.state_bytes) == (0, None)
        assert status.states_unavailable == "mamba_cache_mode:align"
        assert status.staged_parts == "K/V (states by stock: mamba_cache_mode:align)"
    finally:
        second.close()
