"""The checklist on one engine, on either runner: how requests end, sample and are constrained; log
probabilities, ties and request times.

On a GPU with full CUDA graphs for windows of 1, 2, 4 and 8 requests, async scheduling, and float32,
so that vLLM takes its Triton attention and tokens can be compared. The CPU's sampled tokens cannot:
two stock runs of one seed differ.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checklist_rows import (
    PENALTIES,
    PROMPTS,
    check_everything_in_one_batch,
    check_grammar,
    check_logit_bias_is_refused,
    check_max_tokens,
    check_model_length,
    check_penalties,
    check_sampled,
    check_shared_prefixes,
    check_stops,
)
from checklist_tools import ask, check_cache, check_counts, check_partial, compare, greedy
from engine_tools import EAGER, FULL_FOR_ALL, SCV, close, prompts_of, run_cell, tiny_pair, tiny_spec

from nwor_bench.analysis.parity.ties import Place
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TOP, TieCheck

pytestmark = pytest.mark.engine

LONG = pytest.mark.long
ATTEMPTS = 20
"""Batches a sampled case may take: stock vLLM's CPU sampler accepts from 0 to 30 drafts in one."""


def engines(*names: str, cpu: tuple[pytest.MarkDecorator, ...] = ()) -> pytest.MarkDecorator:
    """Run a test on these engines, on the CPU with further marks."""
    marks = {
        "cpu": cpu, "eager": [pytest.mark.gpu],
        "full": [pytest.mark.gpu, pytest.mark.row("CUDA graphs")],
    }  # fmt: skip
    cases = [pytest.param(name, marks=marks[name], id=name) for name in names]
    return pytest.mark.parametrize("engine", cases, indirect=True)


BOTH = engines("cpu", "full")
ALL = engines("cpu", "full", "eager")


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VllmEngine]:
    """A draft model with partial acceptance; a GPU's process holds one engine at a time."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    graphs = {"cpu": None, "full": FULL_FOR_ALL, "eager": EAGER}[request.param]
    own = {} if graphs is None else {
        "draft_tokens": 4, "engine_args": json.dumps({**graphs, "enable_prefix_caching": True})
    }  # fmt: skip
    made = start_engine(pair, tiny_spec(block_size=32, **own))
    yield made
    close(made)


@pytest.fixture(params=[("off",), pytest.param(("graph", "adaptive"), marks=LONG)], ids="-".join)
def scv_modes(request: pytest.FixtureRequest) -> Sequence[str]:
    """The SCV modes of a row."""
    modes: tuple[str, ...] = request.param
    return modes


@engines("full")
@pytest.mark.row("Llama")
@pytest.mark.row("draft_model")
@pytest.mark.row("partial acceptance")
@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(1, marks=pytest.mark.row("one request")),
        pytest.param(3, marks=pytest.mark.row("several requests")),
        pytest.param(8, marks=pytest.mark.row("several requests")),
    ],
)
def test_any_number_of_requests(engine: VllmEngine, requests: int) -> None:
    """Three are padded to the graph of four."""
    stock, staged = compare(engine, PROMPTS[:requests], greedy(), SCV)
    check_partial(stock)
    check_cache(engine, PROMPTS[:requests], staged)


@BOTH
@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("max tokens inside a window")
def test_max_tokens_inside_a_window(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    check_max_tokens(engine, scv_modes)


@BOTH
@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("stop strings inside a window")
@pytest.mark.parametrize("kind", ["stop", pytest.param("stop_token_ids", marks=LONG)])
def test_stop_inside_a_window(engine: VllmEngine, scv_modes: Sequence[str], kind: str) -> None:
    check_stops(engine, kind, scv_modes)


@engines("full")
@pytest.mark.row("temperature and top-p")
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.3}, {"temperature": 0.7}, {"temperature": 0.5, "top_p": 0.5}],
    ids=["0.3", "0.7", "top-p"],
)
def test_sampled_tokens(engine: VllmEngine, settings: dict[str, float]) -> None:
    """Requests that bring no seed: the V2 runner draws theirs from a stream that a batch seeds."""
    check_sampled(engine, greedy(32, **settings), SCV)


@engines("full")
@pytest.mark.row("seeds")
def test_seeds_beside_greedy_requests(engine: VllmEngine) -> None:
    params = [greedy(32, temperature=0.3 * (n % 4), seed=n) for n in range(len(PROMPTS))]
    check_sampled(engine, params, SCV)


@engines("cpu", cpu=(LONG,))
@pytest.mark.row("temperature and top-p")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.3}, {"temperature": 0.5, "top_p": 0.5}], ids=["0.3", "top-p"]
)
@pytest.mark.parametrize("scv", ["off", "graph"])
def test_sampling_leaves_a_sound_cache(
    engine: VllmEngine,
    scv: str,
    settings: dict[str, float],
    record_property: Callable[[str, str], None],
) -> None:
    """Sampled tokens cannot be compared, but what goes on from them can.

    Without top-k, with which stock vLLM 0.32 reads memory out of bounds on a CPU as soon as it
    speculates.
    """
    params = greedy(32, **settings)
    staged = ask(engine, "stage", PROMPTS, params, scv=scv)
    check_counts(engine, staged)
    assert staged.tokens != ask(engine, "off", PROMPTS, greedy(32)).tokens
    committed = 0
    for _ in range(ATTEMPTS):
        staged = ask(engine, "stage", PROMPTS, params, scv=scv)
        check_cache(engine, PROMPTS, staged)
        committed += staged.total("committed_tokens")
        if committed >= len(PROMPTS):
            break
    assert committed > 0  # else no cache held a commit, and nothing was compared
    record_property("note", "sampled tokens differ between two stock runs of one seed on a CPU; "
                            "counts and the cache that is left behind are compared")  # fmt: skip


@engines("cpu", cpu=(LONG,))
@pytest.mark.row("seeds")
def test_seeds_of_requests(engine: VllmEngine, record_property: Callable[[str, str], None]) -> None:
    """Stock vLLM's rejection sampler gives other tokens each time on a CPU, seeds or not."""
    params = [greedy(32, temperature=0.3, seed=n) for n in range(len(PROMPTS))]
    first, again = (ask(engine, "off", PROMPTS, params) for _ in range(2))
    staged = ask(engine, "stage", PROMPTS, params)
    check_counts(engine, staged)
    check_cache(engine, PROMPTS, staged)
    if first.tokens == again.tokens:
        assert staged.tokens == first.tokens
    else:
        record_property("note", "stock vLLM's CPU sampler is not reproducible from a request's "
                                "seed; counts and the cache are compared")  # fmt: skip


@engines("cpu", "full", cpu=(LONG,))
@pytest.mark.row("penalties")
@pytest.mark.parametrize("settings", PENALTIES.values(), ids=PENALTIES)
def test_penalties(engine: VllmEngine, scv_modes: Sequence[str], settings: dict[str, Any]) -> None:
    check_penalties(engine, settings, scv_modes)


@BOTH
@pytest.mark.row("penalties")
@pytest.mark.row("structured output")
def test_every_request_of_a_batch_asks_for_something_else(
    engine: VllmEngine, scv_modes: Sequence[str]
) -> None:
    check_everything_in_one_batch(engine, scv_modes)


@BOTH
def test_drafts_are_cut_at_the_longest_context(
    engine: VllmEngine, scv_modes: Sequence[str]
) -> None:
    """Windows of different draft counts run in no captured graph, beside others that do."""
    check_model_length(engine, scv_modes)


@BOTH
def test_logit_bias_and_min_p_are_vllms_to_refuse(engine: VllmEngine) -> None:
    check_logit_bias_is_refused(engine)


@BOTH
@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """With async scheduling the scheduler validates drafts while the forward already runs."""
    check_grammar(engine, scv_modes)


@engines("full")
@pytest.mark.row("shared prefixes")
def test_requests_share_blocks(engine: VllmEngine) -> None:
    check_shared_prefixes(engine, SCV)


MIXED = prompts_of([24, 70, 18, 40])
LENGTHS = [12, 30, 7, 1]
OFF = Cell("tiny", NworMode.OFF, ScvMode.OFF)
TOLERANCE = {"cpu": 2e-4, "full": 2e-3, "eager": 2e-3}


@pytest.fixture
def tolerance(request: pytest.FixtureRequest) -> float:
    """How far log probabilities may be from the model's own."""
    return TOLERANCE[request.node.callspec.params["engine"]]


def reference_logprobs(engine: VllmEngine, ids: list[int]) -> torch.Tensor:
    """Next-token log probabilities behind each of `ids` [tokens, vocabulary], by transformers."""
    from transformers import AutoModelForCausalLM

    target = str(engine._llm.llm_engine.vllm_config.model_config.model)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def counted(output: BatchOutput) -> tuple[Any, ...]:
    """A batch less its times."""
    windows = [
        {name: value for name, value in vars(window).items() if not name.endswith("_ms")}
        for window in output.windows
    ]
    return output.token_ids, output.counters, windows


@ALL
@pytest.mark.parametrize("nwor", ["off", "stage"])
def test_log_probabilities_are_the_models_own_at_every_output_position(
    engine: VllmEngine, tolerance: float, nwor: str
) -> None:
    """Reference: transformers."""
    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode.GRAPH))
    outputs = engine.decode_greedily(MIXED, LENGTHS, ignore_eos=True, top=TOP)
    assert [len(output.token_ids) for output in outputs] == LENGTHS
    for prompt, output in zip(MIXED, outputs, strict=True):
        expected = reference_logprobs(engine, [*prompt, *output.token_ids])
        assert len(output.top) == len(output.token_ids)
        for at, (token, top) in enumerate(zip(output.token_ids, output.top, strict=True)):
            row = expected[len(prompt) - 1 + at]
            assert token == max(top, key=lambda t: top[t])
            assert set(row.topk(5).indices.tolist()) <= set(top)
            found = torch.tensor([top[t] for t in top])
            torch.testing.assert_close(found, row[list(top)], atol=tolerance, rtol=0)


@engines("cpu")
def test_a_rounding_step_of_attention_moves_log_probabilities_and_leaves_no_trace(
    engine: VllmEngine,
) -> None:
    engine.set_modes(OFF)
    ones = [1] * len(MIXED)
    plain, nudged, again = (
        engine.decode_greedily(MIXED, ones, ignore_eos=True, top=TOP, nudged=on)
        for on in (False, True, False)
    )
    assert again == plain
    for first, moved in zip(plain, nudged, strict=True):
        both = set(first.top[0]) & set(moved.top[0])
        moves = [abs(first.top[0][t] - moved.top[0][t]) for t in both]
        assert 0 < max(moves) < 1e-3  # float32


@ALL
@pytest.mark.parametrize("nwor", [pytest.param("off", marks=LONG), "stage"])
def test_measured_batches_do_not_see_what_was_asked_between_them(
    engine: VllmEngine, nwor: str
) -> None:
    before = run_cell(engine, nwor, "graph", MIXED)
    engine.decode_greedily(MIXED, LENGTHS, ignore_eos=True, top=TOP)
    engine.decode_greedily(MIXED, LENGTHS, ignore_eos=True, keep_prefix_cache=True)
    assert counted(run_cell(engine, nwor, "graph", MIXED)) == counted(before)
    assert before.counters.draft_tokens > 0


@engines("cpu", "full", "eager", cpu=(LONG,))
def test_the_tie_check_tells_a_gap_from_a_tie_and_goes_on(
    engine: VllmEngine, tolerance: float
) -> None:
    """In float32 mode off's gaps move only by rounding: the second likeliest is no tie."""
    reference = run_cell(engine, "off", "off", MIXED, max_new_tokens=20).token_ids
    ties = TieCheck(engine, OFF, lambda: MIXED, 20, ignore_eos=True)
    row = reference_logprobs(engine, [*MIXED[1], *reference[1][:5]])[-1]
    second = int(row.topk(2).indices[1])
    places = [Place(1, 5, reference[1][5], second), Place(1, 5, reference[1][5], reference[1][5])]
    verdicts = ties.check(MIXED, reference, places)
    gap = float(row[reference[1][5]] - row[second])
    assert gap > 1e-3, "choose another place: these two are a tie"
    assert verdicts[0].gap == pytest.approx(gap, abs=tolerance)
    assert [verdict.is_tie for verdict in verdicts] == [False, True]
    assert ties.measured is not None
    assert 0 <= ties.measured.rms < tolerance / 2
    assert ties.measured.positions == 80
    stage = Cell("tiny", NworMode.STAGE, ScvMode.GRAPH)
    rest = ties.go_on(stage, MIXED, reference, {1: 6, 3: 19})
    assert rest == {1: reference[1][6:], 3: reference[3][19:]}


@engines("cpu")
def test_vllms_request_metrics_are_each_batchs_own(engine: VllmEngine) -> None:
    """TTFT and TPOT agree with the batch's latency."""
    prompts = prompts_of([24, 150, 18, 40, 27, 22, 30, 35, 20, 26])  # two wait for others to end
    engine.decode_greedily(prompts, [20] * 10, ignore_eos=True)  # its steps must not be counted
    for mode in ("off", "stage"):
        output = run_cell(engine, mode, "off", prompts)
        times = output.request_times
        assert times is not None
        assert (len(times.ttft_ms), len(times.tpot_ms)) == (10, 10)
        lengths = [len(tokens) for tokens in output.token_ids]
        decoding = [tpot * (n - 1) for tpot, n in zip(times.tpot_ms, lengths, strict=True)]
        for first, rest in zip(times.ttft_ms, decoding, strict=True):
            assert 0 < first < first + rest <= output.latency_ms + 5
        assert max(times.ttft_ms) > 2 * min(times.ttft_ms)
