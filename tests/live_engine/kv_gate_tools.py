"""The K/V gate's cells on one engine, without a sweep around them."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from checklist_tools import Answers, ask
from engine_tools import run_cell, total

from nwor_bench.analysis.parity.kv import KvResult, KvVerdict
from nwor_bench.analysis.parity.local import LocalResult, local_result
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.kv import KvGate
from nwor_bench.run.gate.parity import BatchAnswer

OFF = Cell("tiny", NworMode.OFF, ScvMode.OFF)
STAGE = Cell("tiny", NworMode.STAGE, ScvMode.OFF)


def answer_of(output: BatchOutput | Answers, nwor_mode: NworMode = NworMode.STAGE) -> BatchAnswer:
    """What the K/V gate looks at of a gate batch's answer."""
    record: Any = SimpleNamespace(
        nwor_mode=nwor_mode,
        staged_tokens=total(output, "staged_tokens"),
        windows=len(output.windows),
        draft_tokens=total(output, "draft_tokens"),
        vllm_accepted_per_position=output.counters.accepted_per_position,
    )
    return BatchAnswer(record, output.token_ids)


def kv_results(
    engine: VllmEngine,
    prompts: list[list[int]],
    *,
    one_attention: bool | None = None,
    before_check: Callable[[Any], None] = lambda output: None,
    scv_modes: Sequence[str] = ("off",),
    max_new_tokens: int = 40,
    params: Any = None,
) -> list[KvResult]:
    """off x off, then `stage` in these SCV modes, each checked by one K/V gate.

    Args:
        one_attention: whether rows may be compared bit for bit; None: as the gate decides.
        before_check: called between each staged batch and the check.
        params: vLLM's SamplingParams (one, or a list with one a request); None: greedy.
    """

    def ran(nwor: str, scv: str) -> BatchOutput | Answers:
        if params is not None:
            return ask(engine, nwor, prompts, params, scv=scv)
        return run_cell(engine, nwor, scv, prompts, max_new_tokens)

    gate = KvGate(engine.kv_cache(), engine.set_modes, engine.status(), OFF)
    if one_attention is not None:
        gate._one_attention = one_attention
    results = []
    with gate.watching():
        stock = ran("off", "off")
        assert gate.check(OFF, prompts, answer_of(stock)) is None
        for scv in scv_modes:
            staged = ran("stage", scv)
            before_check(staged)
            cell = Cell("tiny", NworMode.STAGE, ScvMode(scv))
            result = gate.check(cell, prompts, answer_of(staged))
            assert result is not None
            results.append(result)
    return results


def check_gates(
    engine: VllmEngine, prompts: list[list[int]], params: Any, scv_modes: Sequence[str] = ("off",)
) -> list[LocalResult]:
    """Both gates find staged batches with these SamplingParams sound; the local gate's results."""
    for result in kv_results(engine, prompts, params=params, scv_modes=scv_modes):
        assert result.verdict in (KvVerdict.EXACT, KvVerdict.WITHIN), result.reason
        assert result.checked > 0
    found = []
    for scv in scv_modes:
        engine.set_modes(Cell("tiny", NworMode.STAGE, ScvMode(scv)))
        engine.check_layers(len(prompts))
        try:
            ask(engine, "stage", prompts, params, scv=scv)
        finally:
            found.append(local_result(engine.check_layers(None)))
        assert found[-1].verdict is KvVerdict.WITHIN, found[-1].reason
        assert found[-1].written > 0
    return found


def change_a_value(
    worker: Any, layer: int, request: int, position: int, column: int, head: int, rank: int
) -> None:
    """Add 1 to one element of the cache on one rank, where that request has that position.

    Requests are numbered in the order in which the batch named them. Called in every worker.
    """
    if worker.rank != rank:
        return
    hook = worker.nwor_hook
    changed = hook.target_layers[layer]
    groups = hook.runner.kv_cache_config.kv_cache_groups
    group = next(n for n, each in enumerate(groups) if changed in each.layer_names)
    tables = worker.nwor_tools["rows"]._groups[group]._tables
    name = sorted(tables._tables, key=int)[request]
    (held,) = tables.held(name, position, position + 1)
    assert held is not None
    assert tables.is_current(held)
    slot = held[0] * tables.block_size + position % tables.block_size
    cache = hook.runner.compilation_config.static_forward_context[changed].kv_cache
    size = cache.shape[2]
    element = cache[slot // size, head, slot % size]
    if element.dtype is torch.uint8:
        element = element.view(torch.float8_e4m3fn)
    with torch.inference_mode():  # the cache was made in it
        element[column] = (element[column].float() + 1).to(element.dtype)


def check_whole(result: KvResult, committed: int, ranks: int = 1) -> None:
    """Every position was compared, in three layers."""
    assert result.reason is None
    assert (result.committed, result.checked, result.unknown) == (committed, committed, 0)
    assert (result.layers, result.ranks, result.beyond_budget) == (3, ranks, 0)
