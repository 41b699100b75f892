"""Real vLLM on a GPU: staging gives the stock tokens, eagerly and under every kind of CUDA graph.

Float32, so that vLLM takes its Triton attention and tokens can be compared exactly.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import (
    AA_CELL,
    EAGER,
    INTERLEAVED_CELLS,
    PIECEWISE,
    prompts_of,
    run_cell,
    run_interleaved,
    tiny_pair,
    tiny_spec,
    total,
    total_of,
    worker_of,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.plugin.attaching import HOOK
from nwor_bench.records.cell import SHAM, SWITCHED

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": EAGER,
    "full": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [5, 20, 40],
        }
    },
    "piecewise": PIECEWISE,
}
STAGES: dict[str, dict[str, str]] = {
    "reference": {},
    "copy": {"stage_by": "copy"},
}
ENGINES = [
    *[(graphs, "reference") for graphs in GRAPHS],
    *[(graphs, "copy") for graphs in ("eager", "full")],
]
LENGTHS = [130, 21, 90, 33, 61, 150, 40, 77]
"""With 64 tokens a step, long prompts come in chunks beside the windows of short ones."""


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """One engine a kind of CUDA graph and of staging; vLLM cannot hold two at a time."""
    graphs, stage = request.param
    arguments = {**GRAPHS[graphs], "max_num_batched_tokens": 64}
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model", noise=0.2)
    spec = tiny_spec(draft_tokens=4, engine_args=json.dumps(arguments), **STAGES[stage])
    started = VllmEngine(pair, spec, None)
    started.graphs, started.stage = graphs, stage  # type: ignore[attr-defined]
    yield started
    started.close()


def counted(output: BatchOutput, name: str) -> int:
    """A count less what vLLM does not count: windows of requests that had finished."""
    return total(output, f"{name}_tokens") - total(output, f"uncounted_{name}_tokens")


def reasons(output: BatchOutput) -> set[str | None]:
    return {window.fallback_reason for window in output.windows}


@pytest.mark.row("CUDA graphs")
@pytest.mark.row("several requests")
@pytest.mark.row("prefill beside decode")
@pytest.mark.row("partial acceptance")
@pytest.mark.row("draft_model")
@pytest.mark.row("Llama")
@pytest.mark.parametrize("scv", ["off", "graph", "adaptive"])
def test_staging_gives_the_stock_tokens(engine: VllmEngine, scv: str) -> None:
    prompts = prompts_of(LENGTHS)
    stock = run_cell(engine, "off", "off", prompts)
    staged = run_cell(engine, "stage", scv, prompts)
    assert staged.token_ids == stock.token_ids
    assert 0 < total(staged, "accepted_tokens") < total(staged, "draft_tokens")
    assert reasons(staged) == {None}
    assert total(staged, "staged_tokens") == total(staged, "draft_tokens")
    for output in (stock, staged):
        assert counted(output, "draft") == output.counters.draft_tokens
        assert counted(output, "accepted") == output.counters.accepted_tokens
    for window in staged.windows:
        settled = window.committed_tokens + window.rejected_tokens
        assert window.staged_tokens == settled
        assert window.stage_operations == 3 * window.staged_tokens


def test_interleaved_cells_give_the_stock_tokens(engine: VllmEngine) -> None:
    prompts = prompts_of(LENGTHS)
    stock = run_cell(engine, "off", "off", prompts)
    for seed in "abc":
        output, windows, _ = run_interleaved(engine, prompts, seed=seed)
        assert output.token_ids == stock.token_ids
        assert reasons(output) == {None}
        assert counted(output, "draft") == output.counters.draft_tokens
        assert counted(output, "accepted") == output.counters.accepted_tokens
        for cell, own in windows.items():
            drafts = total_of(own, "draft_tokens")
            assert total_of(own, "staged_tokens") == drafts * (cell.nwor_mode == "stage")
            assert total_of(own, "control_tokens") == drafts * (cell.nwor_mode == "control")
        timed = [w for w in output.windows if w.group is not None and w.wall_ms]
        assert timed
        phases = ("device_ms", "forward_ms", "sample_ms", "commit_ms")
        assert all(min(getattr(w, name) for name in phases) > 0 for w in timed)
    after = run_cell(engine, "off", "off", prompts)
    assert after.token_ids == stock.token_ids
    assert {
        getattr(window, name) for window in after.windows for name in ("device_ms", "forward_ms")
    } == {None}


def test_the_sham_replays_graphs_of_its_own_and_leaves_what_stock_leaves(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of(LENGTHS)
    cache = engine.kv_cache()
    cache.watch(True)
    stock = run_cell(engine, "off", "off", prompts)
    lengths = zip(prompts, stock.token_ids, strict=True)
    spans = [(0, len(prompt) + len(tokens) - 1) for prompt, tokens in lengths]
    assert cache.rows.keep("stock", spans).unreadable is None
    hook = getattr(worker_of(engine), HOOK)
    sham, replayed = hook._parts.sham_graphs, []
    replay = sham.replay
    monkeypatch.setattr(sham, "replay", lambda desc: replayed.append(desc) or replay(desc))
    output, windows, facts = run_interleaved(engine, prompts, cells=(INTERLEAVED_CELLS[0], AA_CELL))
    assert cache.rows.keep("sham", spans).unreadable is None
    found = cache.rows.compare("sham", [(i, "stock", i, len(p)) for i, p in enumerate(prompts)])
    cache.watch(False)
    assert output.token_ids == stock.token_ids
    assert found[0]["checked"] > 0
    assert [entry for entry in found[0]["errors"] if entry["differing"]] == []
    assert total(output, "staged_tokens") == 0
    assert facts[AA_CELL][SHAM][SWITCHED] >= sum(w.group is not None for w in windows[AA_CELL]) > 0
    if engine.graphs == "full":  # type: ignore[attr-defined]
        own, stocks = sham._manager.graphs, hook.runner.cudagraph_manager.graphs
        assert set(own) == set(sham.wanted()) <= set(stocks)
        assert all(own[desc] is not stocks[desc] for desc in own)
        assert replayed
        status = engine._rpc("nwor_status")["cuda_graphs"]
        assert status["sham_window_sizes"] == status["stock_window_sizes"]
        assert status["sham_capture_s"] > 0
    else:
        assert replayed == []


def test_scv_captures_once_and_then_replays(engine: VllmEngine) -> None:
    prompts = prompts_of(LENGTHS[:2])
    for scv in ("graph", "adaptive"):
        output = run_cell(engine, "off", scv, prompts)
        paths = [window.scv_path for window in output.windows]
        assert set(paths) <= {"device", "capture", "graph"}
        assert paths.count("graph") == output.scv_counters.get("scv_graph_hits", 0) > 0
        if scv == "graph":
            assert output.scv_counters.get("scv_fallback_count", 0) == paths.count("device")


def test_off_leaves_the_layers_as_vllm_made_them(engine: VllmEngine) -> None:
    run_cell(engine, "stage", "off", prompts_of(LENGTHS[:2]), 8)
    run_cell(engine, "off", "off", prompts_of(LENGTHS[:2]), 8)
    runner = worker_of(engine).model_runner
    for layer in runner.compilation_config.static_forward_context.values():
        assert {"forward", "do_kv_cache_update"}.isdisjoint(vars(layer.impl))


@pytest.mark.row("faults inside a window")
@pytest.mark.parametrize("method", ["commit", "stage"])
def test_a_fault_inside_a_window_writes_it_directly(
    engine: VllmEngine,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, str], None],
) -> None:
    if method == "stage" and engine.graphs == "full":  # type: ignore[attr-defined]
        pytest.skip("no layer is called in a replay")
    from nwor_bench.plugin.runner_v2.staging import GpuStaging

    stage = GpuStaging.stage

    def no_commit(*_: Any) -> str:
        raise RuntimeError("planted")

    def no_second_layer(self: Any, layer: int, *rest: Any) -> str:
        return "planted" if layer == 1 else stage(self, layer, *rest)

    broken, reason = {
        "commit": (no_commit, "commit:RuntimeError"),
        "stage": (no_second_layer, "stage:planted"),
    }[method]
    prompts = prompts_of(LENGTHS)
    stock = run_cell(engine, "off", "off", prompts)
    monkeypatch.setattr(GpuStaging, method, broken)
    output = run_cell(engine, "stage", "off", prompts)
    assert output.token_ids == stock.token_ids
    assert reasons(output) == {reason}
    record_property("written_directly", reason)
    assert total(output, "staged_tokens") == 0
