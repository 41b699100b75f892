"""Real vLLM on a GPU with breakable CUDA graphs: windows in full graphs are staged, others not.

vLLM reads VLLM_USE_BREAKABLE_CUDAGRAPH as its attention is imported, so each test has a process of
its own. Float32 and tokens, as in test_gpu_windows.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import prompts_of, run_cell, tiny_pair, tiny_spec, total

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.own_process]

BREAKABLE = "breakable_cuda_graphs"
LENGTHS = [130, 21, 90, 33, 61, 150, 40, 77]
"""With 64 tokens a step, long prompts come in chunks beside the windows of short ones."""

# (vLLM's mode of CUDA graphs, reasons of staged windows and of those beside prefills)
CASES = [("FULL_AND_PIECEWISE", {None, BREAKABLE}), ("PIECEWISE", {BREAKABLE})]


@pytest.mark.parametrize(("mode", "expected"), CASES, ids=[mode for mode, _ in CASES])
def test_windows_outside_of_piecewise_graphs_are_staged(
    mode: str,
    expected: set[str | None],
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    sizes = [5, 10, 15, 20, 25, 30, 35, 40, 64]
    compilation = {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    arguments = {"compilation_config": compilation, "max_num_batched_tokens": 64}
    spec = tiny_spec(draft_tokens=4, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path / "model", "draft_model", noise=0.2), spec)
    assert engine.status().staging_unavailable is None
    prompts = prompts_of(LENGTHS)
    engine.set_hooks(False)
    alone = run_cell(engine, "off", "off", prompts)
    engine.set_hooks(True)
    for scv in ("off", "graph"):
        staged = run_cell(engine, "stage", scv, prompts)
        assert staged.token_ids == alone.token_ids, scv
        found = {window.fallback_reason for window in staged.windows}
        assert found == expected, (scv, found)
        check_counts(staged.windows)
    assert total(run_cell(engine, "off", "off", prompts), "staged_tokens") == 0
    facts = engine.status().cuda_graphs
    assert facts is not None
    assert facts.stage_window_sizes == facts.stock_window_sizes, facts
    assert bool(facts.stage_window_sizes) == (None in expected), facts


def check_counts(windows: list[dict[str, Any]]) -> None:
    """A window is staged whole, or written directly with its reason."""
    for window in windows:
        direct = window.fallback_reason is not None
        assert window.staged_tokens == (0 if direct else window.draft_tokens), window
        if not direct:
            settled = window.committed_tokens + window.rejected_tokens
            assert settled == window.staged_tokens, window
