"""What is asked of real vLLM beside tokens: log probabilities for the tie rule, request times."""

from typing import Any

import pytest
import torch
from engine_tools import prompts_of, run_cell, tiny_pair, tiny_spec
from refusals import refused

from nwor_bench.analysis.parity.ties import Place
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.ties import TOP, TieCheck

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([24, 70, 18, 40])
LENGTHS = [12, 30, 7, 1]
OFF = Cell("tiny", NworMode.OFF, ScvMode.OFF)


def reference_logprobs(target: str, ids: list[int]) -> torch.Tensor:
    """Next-token log probabilities behind each of `ids` [tokens, vocabulary], by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def target_of(engine: VllmEngine) -> str:
    return str(engine._llm.llm_engine.vllm_config.model_config.model)


def counted(output: BatchOutput) -> tuple[Any, ...]:
    """A batch less its times."""
    windows = [
        {name: value for name, value in window.items() if not name.endswith("_ms")}
        for window in output.windows
    ]
    return output.token_ids, output.counters, windows


@pytest.mark.parametrize("nwor", ["off", "stage"])
def test_log_probabilities_are_the_models_own_at_every_output_position(
    engine: VllmEngine, nwor: str
) -> None:
    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode.OFF))
    outputs = engine.decode_greedily(PROMPTS, LENGTHS, ignore_eos=True, top=TOP)
    assert [len(output.token_ids) for output in outputs] == LENGTHS
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference_logprobs(target_of(engine), [*prompt, *output.token_ids])
        assert len(output.top) == len(output.token_ids)
        for at, (token, top) in enumerate(zip(output.token_ids, output.top, strict=True)):
            row = expected[len(prompt) - 1 + at]
            assert token == max(top, key=lambda t: top[t])
            assert set(row.topk(5).indices.tolist()) <= set(top)
            found = torch.tensor([top[t] for t in top])
            torch.testing.assert_close(found, row[list(top)], atol=2e-4, rtol=0)


def test_a_prefix_from_the_cache_has_the_same_log_probabilities(engine: VllmEngine) -> None:
    engine.set_modes(OFF)
    ones = [1] * len(PROMPTS)
    whole = engine.decode_greedily(PROMPTS, ones, ignore_eos=True, top=TOP)
    cached = engine.decode_greedily(PROMPTS, ones, ignore_eos=True, top=TOP, keep_prefix_cache=True)
    for prompt, first, again in zip(PROMPTS, whole, cached, strict=True):
        expected = reference_logprobs(target_of(engine), prompt)[-1]
        for output in (first, again):
            (top,) = output.top
            found = torch.tensor([top[t] for t in top])
            torch.testing.assert_close(found, expected[list(top)], atol=2e-4, rtol=0)


def test_a_rounding_step_of_attention_moves_log_probabilities_and_leaves_no_trace(
    engine: VllmEngine,
) -> None:
    engine.set_modes(OFF)
    ones = [1] * len(PROMPTS)
    plain, nudged, again = (
        engine.decode_greedily(PROMPTS, ones, ignore_eos=True, top=TOP, nudged=on)
        for on in (False, True, False)
    )
    assert again == plain
    for first, moved in zip(plain, nudged, strict=True):
        both = set(first.top[0]) & set(moved.top[0])
        moves = [abs(first.top[0][t] - moved.top[0][t]) for t in both]
        assert 0 < max(moves) < 1e-3  # float32


def test_without_being_asked_no_log_probabilities_come(engine: VllmEngine) -> None:
    engine.set_modes(OFF)
    outputs = engine.decode_greedily(PROMPTS[:2], [3, 5], ignore_eos=True)
    assert [(len(o.token_ids), o.top) for o in outputs] == [(3, ()), (5, ())]


@pytest.mark.parametrize("nwor", [pytest.param("off", marks=pytest.mark.long), "stage"])
def test_measured_batches_do_not_see_what_was_asked_between_them(
    engine: VllmEngine, nwor: str
) -> None:
    before = run_cell(engine, nwor, "graph", PROMPTS)
    engine.decode_greedily(PROMPTS, LENGTHS, ignore_eos=True, top=TOP)
    engine.decode_greedily(PROMPTS, LENGTHS, ignore_eos=True, keep_prefix_cache=True)
    assert counted(run_cell(engine, nwor, "graph", PROMPTS)) == counted(before)
    assert before.counters.draft_tokens > 0


@pytest.mark.long
def test_the_tie_check_measures_and_goes_on_with_a_real_engine(engine: VllmEngine) -> None:
    """In float32 mode off's gaps move by rounding alone: the second likeliest is no tie."""
    reference = run_cell(engine, "off", "off", PROMPTS, max_new_tokens=20).token_ids
    ties = TieCheck(engine, OFF, lambda: PROMPTS, 20, ignore_eos=True)
    row = reference_logprobs(target_of(engine), [*PROMPTS[1], *reference[1][:5]])[-1]
    second = int(row.topk(2).indices[1])
    places = [Place(1, 5, reference[1][5], second), Place(1, 5, reference[1][5], reference[1][5])]
    verdicts = ties.check(PROMPTS, reference, places)
    gap = float(row[reference[1][5]] - row[second])
    assert gap > 1e-3, "choose another place: these two are a tie"
    assert [round(g, 3) for g in verdicts[0].gaps if g is not None] == [round(gap, 3)] * 3
    assert [verdict.is_tie for verdict in verdicts] == [False, True]
    assert ties.measured is not None
    assert 0 <= ties.measured.rms < 1e-4
    assert ties.measured.positions == 80
    stage = Cell("tiny", NworMode.STAGE, ScvMode.OFF)
    rest = ties.go_on(stage, PROMPTS, reference, {1: 6, 3: 19})
    assert rest == {1: reference[1][6:], 3: reference[3][19:]}


def test_vllms_request_metrics_are_each_batchs_own(
    engine: VllmEngine,
) -> None:
    """TTFT, TPOT and ITL agree with each other and with the batch's latency."""
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
        # A request's inter-token latencies add up to its time after the first token.
        latencies = zip(times.itl_ms, times.itl_counts, strict=True)
        assert sum(ms * n for ms, n in latencies) == pytest.approx(sum(decoding), abs=1.0)
        # Drafts were accepted, so there are fewer steps than tokens.
        assert 10 <= sum(times.itl_counts) < sum(lengths) - 10


@pytest.mark.parametrize("value", [0, 5, 19])
def test_too_few_log_probabilities_are_refused_before_a_start(tmp_path: Any, value: int) -> None:
    from nwor_bench.engine.arguments import check_arguments

    pair = tiny_pair(tmp_path, "ngram")
    spec = tiny_spec(engine_args=f'{{"max_logprobs": {value}}}')
    with refused("--engine-args: max_logprobs", value=value):
        check_arguments(pair, spec)
