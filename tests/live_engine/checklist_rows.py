"""The checklist's rows on one engine, whichever runner it has: what its tests do."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checklist_tools import (
    Answers,
    ask,
    check_cache,
    check_counts,
    check_partial,
    check_same,
    compare,
    greedy,
    metric,
)
from engine_tools import prompts_of, worker_of
from kv_gate_tools import check_gates
from tiny_drafters import write_lora

from nwor_bench.engine.engine import VllmEngine

PRINTABLE = 90
"""Token ids below it are printable characters: prompts of them are text, one token a letter."""

PROMPTS = [[token % PRINTABLE for token in p] for p in prompts_of([24, 31, 18, 40, 27, 22, 35, 29])]
ONE_LONG = prompts_of([100, 31, 18, 40, 27, 22, 35, 29])
"""The first is longer than the tiny models' sliding windows of 32 tokens."""

LONG = prompts_of([60, 71, 55, 90, 64, 58, 80, 66])
SHARED = [[66] + [65] * 130 + prompt[1:] for prompt in prompts_of([20] * 8)]

SMALL_CACHE = {"num_gpu_blocks_override": 24}
"""With blocks of 32 tokens room for about half of what LONG needs with 60 tokens more."""

PENALTIES: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7},
    "allowed tokens": {"allowed_token_ids": list(range(60, 130))},
    "min tokens": {"min_tokens": 20, "stop_token_ids": list(range(120))},
    "bad words": {"bad_words": [chr(token) for token in range(65, 78)], "detokenize": True},
}
"""What changes logits with each token that is given, the drafts of a window included."""


def dropped(answers: Answers) -> int:
    """Tokens that windows gave beyond the end of a request: it finished inside a window.

    A request has its first token from its prefill, and from each window what was accepted and
    one more; a step without drafts gives one, so this counts too few, never too many.
    """
    windows = answers.counters.num_drafts + answers.counters.accepted_tokens
    return len(answers.tokens) + windows - sum(map(len, answers.tokens))


def check_max_tokens(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """Each request has another limit, so that some end inside a window."""
    params = [greedy(length) for length in range(2, 10)]
    stock, staged = compare(engine, PROMPTS, params, scv_modes)
    assert [len(tokens) for tokens in stock.tokens] == list(range(2, 10))
    assert dropped(stock) > 0
    check_cache(engine, PROMPTS, staged)


def check_stops(engine: VllmEngine, kind: str, scv_modes: Sequence[str]) -> None:
    """Each request stops at what it said half-way, by letter or by token.

    vLLM 0.31 returns what a window gave beyond a stop string, so nothing is dropped there.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    free = ask(engine, "off", PROMPTS, greedy(40, detokenize=True))
    params = []
    for text, tokens in zip(free.texts, free.tokens, strict=True):
        letter = next(c for c in text[len(text) // 2 :] if c.isascii() and c.isprintable())
        stop = [letter] if kind == "stop" else [tokens[20]]
        params.append(greedy(40, detokenize=True, **{kind: stop}))
    stock, staged = compare(engine, PROMPTS, params, scv_modes)
    assert set(stock.finish_reasons) == {"stop"}
    assert all(len(a) < len(b) for a, b in zip(stock.tokens, free.tokens, strict=True))
    if kind == "stop_token_ids" or hasattr(OutputProcessor, "_trim_surplus_tokens"):
        assert dropped(stock) > 0
    check_cache(engine, PROMPTS, staged)


def check_penalties(engine: VllmEngine, settings: dict[str, Any], scv_modes: Sequence[str]) -> None:
    """Logits that depend on what was said before."""
    stock, staged = compare(engine, PROMPTS, greedy(40, **settings), scv_modes)
    assert stock.tokens != ask(engine, "off", PROMPTS, greedy(40)).tokens
    assert min(map(len, stock.tokens)) >= settings.get("min_tokens", 40)
    check_cache(engine, PROMPTS, staged)
    check_gates(engine, PROMPTS, greedy(40, **settings), scv_modes)


def everything_in_one_batch() -> list[Any]:
    """SamplingParams of eight requests: a penalty, a grammar or an early end, and two plain ones.

    Where a grammar cuts drafts, windows of one batch have different draft counts.
    """
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    grammars = [{"regex": "[!-~]{30}"}, {"json": schema}, {"choice": ["yes", "nevertheless"]}]
    constrained = [
        greedy(30, ignore_eos=False, structured_outputs=StructuredOutputsParams(**each))
        for each in grammars
    ]
    penalised = [
        greedy(40, **PENALTIES[name]) for name in ("penalties", "min tokens", "allowed tokens")
    ]
    return [greedy(40), *constrained, *penalised, greedy(7)]


def check_uneven(answers: Answers) -> None:
    """In some windows one request has more drafts than another, forbidden ones left out."""
    each = [(window.drafts_per_position, window.num_reqs) for window in answers.windows]
    assert any(0 < sum(drafts) < len(drafts) * requests for drafts, requests in each)


def check_everything_in_one_batch(engine: VllmEngine, scv_modes: Sequence[str]) -> Answers:
    """Requests that ask for different things share windows; the last staged answers."""
    params = everything_in_one_batch()
    stock, staged = compare(engine, PROMPTS, params, scv_modes)
    check_partial(stock)
    check_uneven(staged)
    check_cache(engine, PROMPTS, staged)
    check_gates(engine, PROMPTS, params, scv_modes)
    return staged


def check_model_length(engine: VllmEngine, scv_modes: Sequence[str], most: int = 512) -> None:
    """Requests that reach the model's longest context one after the other: drafts are cut there.

    vLLM's draft model then reads rows of its own cache that nobody wrote (seen with our hooks
    taken off), so that drafts differ from batch to batch in mode off too: tokens may not.
    """
    prompts = prompts_of([most - 5 - 4 * number for number in range(8)])
    stock = ask(engine, "off", prompts, greedy(40))
    assert [len(p) + len(t) for p, t in zip(prompts, stock.tokens, strict=True)] == [most] * 8
    check_partial(stock)
    for scv in scv_modes:
        staged = ask(engine, "stage", prompts, greedy(40), scv=scv)
        assert staged.tokens == stock.tokens
        check_counts(engine, staged)
        check_uneven(staged)
    check_gates(engine, prompts, greedy(40), scv_modes)


def check_grammar(engine: VllmEngine, scv_modes: Sequence[str]) -> Answers:
    """The drafter knows no grammar: its drafts are cut where they leave it. The stock answers."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = "[!-~]{30}"
    constraint = StructuredOutputsParams(regex=grammar)
    params = [
        greedy(30, detokenize=True, ignore_eos=False, structured_outputs=which)
        for which in [None, constraint] * 4
    ]
    stock, staged = compare(engine, PROMPTS, params, scv_modes)
    assert all(re.fullmatch(grammar, text) for text in stock.texts[1::2])
    free = ask(engine, "off", PROMPTS, greedy(30, detokenize=True))
    assert stock.tokens[::2] == free.tokens[::2]
    assert stock.tokens[1::2] != free.tokens[1::2]
    assert 0 < stock.counters.draft_tokens < 4 * stock.counters.num_drafts
    check_cache(engine, PROMPTS, staged)
    return stock


def check_logit_bias_is_refused(engine: VllmEngine) -> None:
    """vLLM takes neither a logit bias nor min-p while it speculates: there is nothing to stage."""
    from vllm.exceptions import VLLMValidationError

    for asked in ({"logit_bias": {70: 5.0}}, {"min_p": 0.1, "temperature": 0.5}):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative"):
            ask(engine, "stage", PROMPTS[:1], greedy(4, **asked))


def check_shared_prefixes(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """Requests of one batch share blocks, and a second turn those that commits filled."""
    for scv in scv_modes:
        stock = ask(engine, "off", SHARED, greedy())
        before = metric(engine, "vllm:prefix_cache_hits")
        staged = ask(engine, "stage", SHARED, greedy(), scv=scv)
        between = metric(engine, "vllm:prefix_cache_hits")
        assert between > before
        check_same(engine, staged, stock)
        check_cache(engine, SHARED, staged)
        assert metric(engine, "vllm:prefix_cache_hits") > between


def check_preemption(engine: VllmEngine, scv: str) -> None:
    """An engine with SMALL_CACHE: some of LONG are put back and computed again."""
    alone = [ask(engine, "off", [prompt], greedy(60)).tokens[0] for prompt in LONG]
    before = metric(engine, "vllm:num_preemptions")
    stock = ask(engine, "off", LONG, greedy(60))
    between = metric(engine, "vllm:num_preemptions")
    assert between > before
    staged = ask(engine, "stage", LONG, greedy(60), scv=scv)
    assert metric(engine, "vllm:num_preemptions") > between
    assert staged.tokens == alone
    check_same(engine, staged, stock)
    check_cache(engine, LONG[:2], ask(engine, "stage", LONG[:2], greedy(40), scv=scv))


SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 8, 2]]}
"""Two drafts from four requests on, four below."""


def check_schedule(engine: VllmEngine, scv_modes: Sequence[str]) -> Answers:
    """An engine with SCHEDULE, whose eight requests end one after the other. The staged answers."""
    lengths = [greedy(10 + 8 * number) for number in range(len(ONE_LONG))]
    stock, staged = compare(engine, ONE_LONG, lengths, scv_modes)
    check_partial(stock)
    assert {2, 4} <= {len(window.drafts_per_position) for window in staged.windows}
    return staged


def check_drafter(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """A drafter of one layer in the target's cache group; it is not staged.

    vLLM names its layer as if it were the target's fourth.
    """
    hook = worker_of(engine).nwor_hook
    assert hook.target_layers == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    assert hook.drafter_layers == ["model.layers.3.self_attn.attn"]
    stock, staged = compare(engine, ONE_LONG, greedy(), scv_modes)
    check_partial(stock)
    check_cache(engine, ONE_LONG, staged)


def check_drafter_behind_32_layers(engine: VllmEngine, scv_modes: Sequence[str]) -> None:
    """An engine of 32 layers with an EAGLE head, 16 requests, 8 drafts and two ranks."""
    status = engine.status()
    assert status.target_layers == status.staging_buffers == 32
    assert [rank.drafter_layers for rank in status.ranks] == [1, 1]
    prompts = prompts_of([20 + 3 * n for n in range(16)])
    _, staged = compare(engine, prompts, greedy(), scv_modes)
    assert max(window.draft_tokens for window in staged.windows) == 16 * 8


def check_adapter(
    engine: VllmEngine, target: str, folder: Path, scv_modes: Sequence[str], fallback: str | None
) -> None:
    """A batch with the adapter and one without, never both in one."""
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, str(write_lora(folder, Path(target))))
    plain, _ = compare(engine, ONE_LONG, greedy(), scv_modes, fallback)
    stock, _ = compare(engine, ONE_LONG, greedy(), scv_modes, fallback, lora_request=adapter)
    assert all(a != b for a, b in zip(stock.tokens, plain.tokens, strict=True))
    check_partial(stock)


def check_sampled(engine: VllmEngine, params: Any, scv_modes: Sequence[str]) -> None:
    """Sampled tokens, where two stock runs of one seed give the same."""
    stock = ask(engine, "off", PROMPTS, params)
    assert ask(engine, "off", PROMPTS, params).tokens == stock.tokens
    check_partial(stock)
    for scv in scv_modes:
        staged = ask(engine, "stage", PROMPTS, params, scv=scv)
        assert staged.tokens == stock.tokens
        check_counts(engine, staged)
        check_cache(engine, PROMPTS, staged)
