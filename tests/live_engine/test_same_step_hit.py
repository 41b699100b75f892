"""Real vLLM: a request hits a block that another request's certain token completes in this step.

With synchronous scheduling vLLM publishes the block when it schedules that token. The new request
has one token left and is padded with drafts of -1, so the step looks like equal windows.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checklist_tools import greedy
from engine_tools import EAGER, FULL_FOR_ALL, prompts_of, tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.plugin.runner_v2.plan import may_read_this_step
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.records.window import windows_of

pytestmark = [pytest.mark.engine]

BLOCK = 32
K = 4
LAST_TOKENS = [65, 90, 120]
"""The one token by which each new request is longer than the first one was."""

Found = dict[str, tuple[int, ...]]


def start(engine: VllmEngine, nwor: str) -> tuple[Any, Any]:
    """Switch modes on an empty prefix cache; vLLM's engine and its scheduler."""
    engine.set_modes(Cell("tiny", NworMode(nwor), ScvMode.OFF))
    assert engine._llm.reset_prefix_cache()
    engine._rpc("nwor_drain")
    llm_engine = engine._llm.llm_engine
    return llm_engine, llm_engine.engine_core.engine_core.scheduler


def add(llm_engine: Any, name: str, prompt: list[int], max_tokens: int) -> None:
    llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(max_tokens))


def finish(llm_engine: Any, found: Found) -> Found:
    """Step until every request has ended; tokens by request."""
    while llm_engine.has_unfinished_requests():
        take(llm_engine.step(), found)
    return found


def take(outputs: list[Any], found: Found) -> None:
    for output in outputs:
        if output.finished:
            found[output.request_id] = tuple(output.outputs[0].token_ids)


def hit_in_the_same_step(engine: VllmEngine, nwor: str) -> tuple[Found, list[Any], list[Any]]:
    """Tokens of all requests, the SchedulerOutputs of the steps that hit, and all windows."""
    llm_engine, scheduler = start(engine, nwor)
    (prompt,) = prompts_of([BLOCK + 5])
    add(llm_engine, "first", prompt, 200)
    found: Found = {}
    hits: list[Any] = []
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if any(new.num_computed_tokens for new in output.scheduled_new_reqs):
            hits.append(output)
        return output

    scheduler.schedule = noted
    try:
        while llm_engine.has_unfinished_requests():
            (request,) = [r for name, r in scheduler.requests.items() if "first" in name] or [None]
            known = [] if request is None else list(request.all_token_ids)
            if known and len(known) > len(prompt) and len(known) % BLOCK == 0:
                for last in LAST_TOKENS:
                    add(llm_engine, f"hit-{len(known)}-{last}", [*known, last], 12)
            take(llm_engine.step(), found)
    finally:
        del scheduler.schedule
    answers = engine._rpc("nwor_drain", {name: len(tokens) for name, tokens in found.items()})
    assert answers["device_errors"] == []
    return found, hits, windows_of(answers["windows"])


def check_hits(engine: VllmEngine) -> list[Any]:
    """Tokens are equal staged, stock, and stock where each request runs alone."""
    stock, _, _ = hit_in_the_same_step(engine, "off")
    staged, hits, windows = hit_in_the_same_step(engine, "stage")
    assert staged == stock
    assert len(stock) > 1 + len(LAST_TOKENS), "no block was completed by a certain token"
    padded = [
        (output, new)
        for output in hits
        for new in output.scheduled_new_reqs
        if output.scheduled_spec_decode_tokens.get(new.req_id) == [-1] * K
    ]
    assert padded
    for output, new in padded:
        assert new.num_computed_tokens % BLOCK == 0
        # The block's last token is computed in this step: by the request that came first.
        cached = output.scheduled_cached_reqs
        assert new.num_computed_tokens - 1 in cached.num_computed_tokens
        # Nothing but equal windows, which the V2 runner's hook would have staged whole.
        assert set(output.num_scheduled_tokens.values()) == {K + 1}
        assert may_read_this_step(output)
    alone: Found = {}
    (prompt,) = prompts_of([BLOCK + 5])
    sequence = [*prompt, *stock["first"]]
    for name in stock:
        if name == "first":
            continue
        _, length, last = name.split("-")
        llm_engine, _ = start(engine, "off")
        add(llm_engine, name, [*sequence[: int(length)], int(last)], 12)
        finish(llm_engine, alone)
    assert {name: stock[name] for name in alone} == alone
    return windows


@pytest.mark.long
def test_a_cpu_gives_the_stock_tokens(
    start_engine: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    """The V1 runner writes certain tokens at once in every step."""
    pair = tiny_pair(tmp_path, "draft_model", noise=0.2)
    engine = start_engine(pair, tiny_spec(draft_tokens=K, block_size=BLOCK, max_new_tokens=300))
    windows = check_hits(engine)
    assert {window.fallback_reason for window in windows} == {None}


@pytest.mark.gpu
@pytest.mark.parametrize("stage_by", ["reference", "copy"])
@pytest.mark.parametrize("graphs", [EAGER, FULL_FOR_ALL], ids=["eager", "full"])
def test_a_gpu_gives_the_stock_tokens(
    graphs: dict[str, Any],
    stage_by: str,
    start_alone: Callable[..., VllmEngine],
    tmp_path: Path,
) -> None:
    """By reference a full graph has captured whole steps: such a step is written directly."""
    pair = tiny_pair(tmp_path, "draft_model", noise=0.2)
    arguments = json.dumps({**graphs, "async_scheduling": False, "enable_prefix_caching": True})
    spec = tiny_spec(
        draft_tokens=K,
        block_size=BLOCK,
        max_new_tokens=300,
        engine_args=arguments,
        stage_by=stage_by,
    )
    windows = check_hits(start_alone(pair, spec))
    reasons = {window.fallback_reason for window in windows}
    if graphs is FULL_FOR_ALL and stage_by == "reference":
        assert reasons == {None, "prefix_hit_in_full_graph"}
    else:
        assert reasons == {None}
