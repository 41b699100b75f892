"""The checklist on one engine: how requests end, sample, and are constrained inside a window."""

import re
from collections.abc import Callable

import pytest
from checklist_tools import Answers, ask, check_cache, check_counts, check_same, greedy
from engine_tools import prompts_of

from nwor_bench.engine import VllmEngine

pytestmark = pytest.mark.engine

PRINTABLE = 90
"""Token ids below it are printable characters: prompts of them are text, one token a letter."""

PROMPTS = [[token % PRINTABLE for token in p] for p in prompts_of([24, 31, 18, 40, 27, 22, 35, 29])]
ATTEMPTS = 20
"""Batches a sampled case may take: stock vLLM's CPU sampler accepts from 0 to 30 drafts in one."""

SCV = pytest.mark.parametrize("scv", ["off", "graph"])


def dropped(answers: Answers) -> int:
    """Tokens that windows gave beyond the end of a request: it finished inside a window.

    A request has its first token from its prefill, and from each window what was accepted and
    one more; a step without drafts gives one, so this counts too few, never too many.
    """
    windows = answers.counters.num_drafts + answers.counters.accepted_tokens
    return len(answers.tokens) + windows - sum(map(len, answers.tokens))


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("max tokens inside a window")
@SCV
def test_max_tokens_inside_a_window(engine: VllmEngine, scv: str) -> None:
    params = [greedy(length) for length in range(2, 10)]
    stock = ask(engine, "off", PROMPTS, params)
    assert [len(tokens) for tokens in stock.tokens] == list(range(2, 10))
    assert dropped(stock) > 0
    staged = ask(engine, "stage", PROMPTS, params, scv=scv)
    check_same(engine, staged, stock)
    check_cache(engine, PROMPTS, staged)


@pytest.mark.row("requests that finish inside a window")
@pytest.mark.row("stop strings inside a window")
@pytest.mark.parametrize("kind", ["stop", "stop_token_ids"])
def test_stop_inside_a_window(engine: VllmEngine, kind: str) -> None:
    """Each request stops at what it said half-way, by letter or by token."""
    free = ask(engine, "off", PROMPTS, greedy(40, detokenize=True))
    params = []
    for text, tokens in zip(free.texts, free.tokens, strict=True):
        letter = next(c for c in text[len(text) // 2 :] if c.isascii() and c.isprintable())
        stop = [letter] if kind == "stop" else [tokens[20]]
        params.append(greedy(40, detokenize=True, **{kind: stop}))
    stock = ask(engine, "off", PROMPTS, params)
    assert set(stock.finish_reasons) == {"stop"}
    assert all(len(a) < len(b) for a, b in zip(stock.tokens, free.tokens, strict=True))
    assert dropped(stock) > 0
    staged = ask(engine, "stage", PROMPTS, params)
    check_same(engine, staged, stock)
    check_cache(engine, PROMPTS, staged)


@pytest.mark.row("temperature and top-p")
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.3}, {"temperature": 0.5, "top_p": 0.5}], ids=["0.3", "top-p"]
)
@SCV
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


@pytest.mark.row("penalties")
@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7},
        {"allowed_token_ids": list(range(60, 130))},
    ],
    ids=["penalties", "allowed tokens"],
)
def test_penalties(engine: VllmEngine, settings: dict[str, object]) -> None:
    stock = ask(engine, "off", PROMPTS, greedy(40, **settings))
    assert stock.tokens != ask(engine, "off", PROMPTS, greedy(40)).tokens
    for scv in ("off", "graph"):
        staged = ask(engine, "stage", PROMPTS, greedy(40, **settings), scv=scv)
        check_same(engine, staged, stock)
    check_cache(engine, PROMPTS, staged)


@pytest.mark.row("structured output")
def test_a_grammar_that_invalidates_drafts(engine: VllmEngine) -> None:
    """The drafter knows no grammar: the scheduler cuts its drafts where they leave it."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = "[!-~]{30}"
    constraint = StructuredOutputsParams(regex=grammar)
    params = [
        greedy(30, detokenize=True, ignore_eos=False, structured_outputs=which)
        for which in [None, constraint] * 4
    ]
    stock = ask(engine, "off", PROMPTS, params)
    assert all(re.fullmatch(grammar, text) for text in stock.texts[1::2])
    free = ask(engine, "off", PROMPTS, greedy(30, detokenize=True))
    assert stock.tokens[::2] == free.tokens[::2]
    assert stock.tokens[1::2] != free.tokens[1::2]
    assert 0 < stock.counters.draft_tokens < 4 * stock.counters.num_drafts
    for scv in ("off", "graph"):
        staged = ask(engine, "stage", PROMPTS, params, scv=scv)
        check_same(engine, staged, stock)
    check_cache(engine, PROMPTS, staged)
