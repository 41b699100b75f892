"""Real vLLM with gated delta nets: their states are staged, and the answers stay those of `off`.

In bfloat16 our sum and vLLM's round differently, so where two tokens are as good as equal either
may come; every other difference is a fault.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_tools import Answers, ask, check_counts, check_partial, greedy, metric
from engine_tools import prompts_of, run_interleaved, tiny_spec, total_of, worker_of

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.states import StateOutcome, WindowStates
from nwor_bench.records.types import AA, Cell, NworMode, ScvMode
from nwor_bench.records.window import windows_of
from nwor_kernels.gated_delta.records import WindowInputs

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([20, 30, 25, 41])

WITHOUT_PREFIX_CACHE = {"enforce_eager": True, "enable_prefix_caching": False}

TIE = 0.1
"""Difference of two tokens' logits below which rounding decides: between 8 and 16, where they are,
bfloat16 has steps of 1/16."""


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    arguments = json.dumps(WITHOUT_PREFIX_CACHE)
    spec = tiny_spec(requests=4, kv_cache_gib=0.1, max_model_len=256, engine_args=arguments)
    return start_engine(pair, spec)


@pytest.fixture(scope="module")
def stock(engine: VllmEngine) -> Answers:
    """Mode off; some drafts are accepted and some are not."""
    found = ask(engine, "off", PROMPTS, greedy())
    check_partial(found)
    return found


def hook_of(engine: VllmEngine) -> RunnerHook:
    """The engine's hook, in this process."""
    found: RunnerHook = worker_of(engine).nwor_hook
    return found


def states_of(engine: VllmEngine) -> WindowStates:
    """The engine's states."""
    found = hook_of(engine).states
    assert found is not None
    return found


def gap_of(engine: VllmEngine, tokens: Sequence[int], two: set[int]) -> float:
    """Difference of the logits of two tokens behind these, in mode off."""
    from vllm import SamplingParams

    engine.set_modes(Cell("tiny", NworMode.OFF, ScvMode.OFF))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(tokens)}
    [found] = engine._llm.generate([prompt], params, use_tqdm=False)
    told = found.outputs[0].logprobs[0]
    first, second = (told[token].logprob if token in told else -99.0 for token in two)
    return abs(first - second)


def difference(
    engine: VllmEngine, answers: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]
) -> str | None:
    """The first difference that no tie explains; None if there is none."""
    for request, (ours, theirs) in enumerate(zip(answers, expected, strict=True)):
        assert len(ours) == len(theirs)
        pairs = zip(ours, theirs, strict=True)
        at = next((i for i, both in enumerate(pairs) if both[0] != both[1]), None)
        if at is not None:
            before = [*PROMPTS[request], *theirs[:at]]
            gap = gap_of(engine, before, {ours[at], theirs[at]})
            if gap > TIE:
                return f"request {request}, token {at}: logits differ by {gap:.2f}"
    return None


def check_states(engine: VllmEngine, windows: Sequence[dict[str, Any]], drafts: int) -> None:
    """Every one of these windows wrote one state a request and layer."""
    layers = engine.status().state_layers
    assert layers == 3
    assert {window.states_reason for window in windows} == {None}
    assert total_of(list(windows), "states_avoided") == layers * drafts > 0
    assert all(w.states_committed in (layers * n for n in range(1, 5)) for w in windows)


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


@pytest.mark.parametrize("scv", ["off", "graph"])
def test_staged_states_leave_the_answers(engine: VllmEngine, stock: Answers, scv: str) -> None:
    for _ in range(2):
        staged = ask(engine, "stage", PROMPTS, greedy(), scv=scv)
        check_counts(engine, staged)
        check_states(engine, staged.windows, staged.total("draft_tokens"))
        assert difference(engine, staged.tokens, stock.tokens) is None
    assert stock.total("states_committed") == stock.total("states_avoided") == 0


def test_control_writes_every_state(engine: VllmEngine, stock: Answers) -> None:
    control = ask(engine, "control", PROMPTS, greedy())
    assert difference(engine, control.tokens, stock.tokens) is None
    assert control.total("control_tokens") == control.total("draft_tokens") > 0
    assert control.total("states_committed") == 0


CELLS = (
    *(Cell("tiny", NworMode(nwor), ScvMode.OFF) for nwor in ("off", "stage", "control")),
    Cell("tiny", NworMode.OFF, ScvMode.OFF, AA),
)


@pytest.mark.parametrize("seed", ["a", "b"])
def test_modes_alternate_window_by_window(engine: VllmEngine, stock: Answers, seed: str) -> None:
    output, windows, _ = run_interleaved(engine, PROMPTS, seed=seed, cells=CELLS, untimed=True)
    assert difference(engine, output.token_ids, stock.tokens) is None
    staged = windows[CELLS[1]]
    check_states(engine, staged, total_of(staged, "draft_tokens"))
    others = [window for cell in CELLS if cell is not CELLS[1] for window in windows[cell]]
    assert others
    assert total_of(others, "states_committed") == 0


@pytest.fixture
def after_commit(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[WindowStates, Any, torch.Tensor], None]], list[int]]:
    """Call a function behind each commit, with the indices of each group and the counts."""

    def install(action: Callable[[WindowStates, Any, torch.Tensor], None]) -> list[int]:
        states, calls = states_of(engine), []
        commit = states.commit

        def then(num_sampled: torch.Tensor) -> StateOutcome:
            tables = states._collected() if states._staged else None
            outcome = commit(num_sampled)
            if tables is not None:
                action(states, tables.indices, num_sampled)
                calls.append(outcome.layers)
            return outcome

        monkeypatch.setattr(states, "commit", then)
        return calls

    return install


def test_only_the_committed_state_is_read(
    engine: VllmEngine, stock: Answers, after_commit: Callable[..., list[int]]
) -> None:
    def poison(states: WindowStates, indices: Any, committed: torch.Tensor) -> None:
        for layer in states.layers:
            for row, count in enumerate(committed.tolist()):
                slots = indices[layer.group][row].tolist()
                kept = slots.pop(count - 1)
                assert kept not in slots
                layer.state[slots] = float("nan")

    calls = after_commit(poison)
    answers = ask(engine, "stage", PROMPTS, greedy())
    assert set(calls) == {3}
    assert difference(engine, answers.tokens, stock.tokens) is None


class StockBeside:
    """Runs vLLM's operator on a copy of each layer's states beside ours, and compares."""

    def __init__(self, states: WindowStates):
        from vllm import _custom_ops

        self.outputs: list[float] = []
        self.states: list[float] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._kernels = states._kernels
        self._operator = _custom_ops.torch.ops._C.fused_sigmoid_gating_delta_rule_update_spec_cpu

    def verify(self, inputs: WindowInputs, out: Any, records: Any, **named: Any) -> None:
        """Verify, and let vLLM's operator compute the same."""
        mixed, a, b, log_a, dt_bias, state, indices, accepted, bounds = inputs
        key_heads, key_dim = records.k.shape[-2:]
        widths = [key_heads * key_dim] * 2 + [out.shape[1] * out.shape[2]]
        q, k, v = (part.contiguous() for part in mixed.split(widths, dim=-1))
        heads = q.unflatten(-1, (key_heads, -1)), k.unflatten(-1, (key_heads, -1))
        copy = state.transpose(-1, -2).clone()  # as a CPU keeps it
        told = self._operator(
            log_a, dt_bias, *heads, v.view(out.shape), a, b, copy, indices.contiguous(),
            accepted.contiguous(), bounds.contiguous(), True, 1.0, 20.0,
        )  # fmt: skip
        self._copies[id(log_a)] = copy.transpose(-1, -2)
        self._kernels.verify(inputs, out, records, **named)
        self.outputs.append(relative(out, told.view(out.shape)))

    def compare(self, states: WindowStates, indices: Any, committed: torch.Tensor) -> None:
        """The committed states against the operator's."""
        for layer in states.layers:
            rows = torch.arange(len(committed))
            slots = indices[layer.group][rows, committed - 1].long()
            theirs = self._copies[id(layer.layer.A_log)]  # layers may share memory
            self.states.append(relative(layer.state[slots], theirs[slots]))


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def test_outputs_and_states_are_those_of_vllms_kernel(
    engine: VllmEngine, after_commit: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(engine)
    beside = StockBeside(states)
    monkeypatch.setattr(states, "_kernels", states._kernels._replace(verify=beside.verify))
    after_commit(beside.compare)
    ask(engine, "stage", PROMPTS, greedy(16))
    assert len(beside.outputs) == len(beside.states) >= 9
    assert max(beside.outputs) < 2**-7  # a rounding of bfloat16
    assert max(beside.states) < (1e-5 if states.layers[0].state.dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("fault", ["one too few", "nothing", "another request's"])
def test_a_wrong_commit_is_seen(
    engine: VllmEngine, stock: Answers, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests above rest on: wrong states give other tokens."""
    states = states_of(engine)
    commit = states.commit

    def wrong(num_sampled: torch.Tensor) -> StateOutcome:
        if fault == "one too few":
            return commit((num_sampled - 1).clamp(min=1))
        if fault == "another request's":
            assert states._records is not None
            states._records.u[:] = states._records.u.roll(1, dims=1)
            return commit(num_sampled)
        states.drop()
        return commit(num_sampled)

    monkeypatch.setattr(states, "commit", wrong)
    answers = ask(engine, "stage", PROMPTS, greedy())
    monkeypatch.undo()
    assert difference(engine, answers.tokens, stock.tokens) is not None


def test_a_window_that_falls_back_keeps_its_states(
    engine: VllmEngine, stock: Answers, monkeypatch: pytest.MonkeyPatch
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
    assert difference(engine, answers.tokens, stock.tokens) is None


def test_a_kernel_that_fails_leaves_the_commit_to_torch(
    engine: VllmEngine, stock: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(engine)

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(states, "_kernels", states._kernels._replace(commit=broken))
    monkeypatch.setattr(states, "_commits", {})
    answers = ask(engine, "stage", PROMPTS, greedy(16))
    assert answers.fallbacks == {"commit:states:RuntimeError"}
    assert answers.total("states_committed") > 0
    assert answers.total("staged_tokens") == 0
    assert difference(engine, answers.tokens, [t[:16] for t in stock.tokens]) is None


def one_by_one(engine: VllmEngine, mode: str, interrupt: bool) -> list[tuple[int, ...]]:
    """More requests than run at a time, of several lengths, so that they end and start beside
    others; `interrupt`: all running ones are preempted now and then."""
    engine.set_modes(Cell("tiny", NworMode(mode), ScvMode.OFF))
    engine._rpc("nwor_drain")
    core = engine._llm.llm_engine
    lengths = [9, 40, 23, 31, 17, 28, 12]
    prompts = [PROMPTS[n % 4] for n in range(len(lengths))]
    for number, (prompt, most) in enumerate(zip(prompts, lengths, strict=True)):
        core.add_request(f"r{number}", {"prompt_token_ids": prompt}, greedy(most))
    found: dict[str, tuple[int, ...]] = {}
    steps, before = 0, metric(engine, "vllm:num_preemptions")
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                found[output.request_id] = tuple(output.outputs[0].token_ids)
        steps += 1
        if interrupt and steps % 11 == 10:
            core.reset_prefix_cache(reset_running_requests=True)
    assert (metric(engine, "vllm:num_preemptions") > before) == interrupt
    assert [len(found[f"r{n}"]) for n in range(len(lengths))] == lengths
    return [found[f"r{n}"] for n in range(len(lengths))]


@pytest.mark.parametrize("interrupt", [False, True], ids=["end and start", "preempted"])
def test_requests_come_and_go(engine: VllmEngine, stock: Answers, interrupt: bool) -> None:
    answers = one_by_one(engine, "stage", interrupt)
    windows = windows_of(engine._rpc("nwor_drain")["windows"])
    reasons = {window.states_reason for window in windows}
    assert None in reasons
    assert reasons <= {None, "beside_prefill"}
    assert total_of(windows, "states_committed") > 0
    for request, tokens in enumerate(answers):
        prompt = request % len(PROMPTS)
        expected = list(stock.tokens[prompt][: len(tokens)])
        ours: list[Sequence[int]] = [[]] * len(PROMPTS)
        theirs: list[Sequence[int]] = [[]] * len(PROMPTS)
        ours[prompt], theirs[prompt] = tokens, expected
        assert difference(engine, ours, theirs) is None


def test_with_prefix_caching_stock_keeps_the_states(
    start_engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path / "pair")
    arguments = json.dumps({"enforce_eager": True, "enable_prefix_caching": True})
    spec = tiny_spec(requests=2, kv_cache_gib=0.1, max_model_len=256, engine_args=arguments)
    engine = start_engine(pair, spec)
    try:
        status = engine.status()
        assert status.staging_unavailable is None
        assert (status.state_layers, status.state_bytes) == (0, None)
        assert status.states_unavailable == "mamba_cache_mode:align"
        assert status.staged_parts == "K/V (states by stock: mamba_cache_mode:align)"
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(engine: VllmEngine) -> Iterator[None]:
    yield
    assert hook_of(engine).window is not None
    assert states_of(engine)._staged == []
