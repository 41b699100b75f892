"""Real vLLM on a GPU: flags of a refused commit are read within a batch, and staging stops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import EAGER, FULL_FOR_ALL, prompts_of, run_cell, tiny_pair, tiny_spec, worker_of
from refusals import refused

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.errors import EngineError
from nwor_bench.plugin import late_counts
from nwor_bench.plugin.attaching import HOOK
from nwor_kernels.metadata import ERROR_SLOT_RANGE

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


@pytest.mark.parametrize("graphs", [EAGER, FULL_FOR_ALL], ids=["eager", "full"])
def test_a_refusal_stops_staging_and_fails_a_sweep(
    graphs: dict[str, Any],
    start_alone: Callable[..., VllmEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The flag is planted between batches: no commit was really refused, so tokens are sound."""
    spec = tiny_spec(draft_tokens=4, engine_args=json.dumps(graphs))
    engine = start_alone(tiny_pair(tmp_path, "draft_model", noise=0.2), spec)
    prompts = prompts_of([20, 30, 40, 50])
    stock = run_cell(engine, "off", "off", prompts)
    assert run_cell(engine, "stage", "graph", prompts).token_ids == stock.token_ids
    hook = getattr(worker_of(engine), HOOK)
    monkeypatch.setattr(late_counts, "MOST_PENDING", 4)  # what a server's clock does
    drain, generate = hook.drain, engine._llm.generate
    windows: list[dict[str, Any]] = []

    def drain_and_keep(lengths: dict[str, int] | None) -> Any:
        windows[:] = drain(lengths)
        return windows

    def plant_and_generate(*args: Any, **kwargs: Any) -> Any:
        hook.buffers.errors[1] = ERROR_SLOT_RANGE
        return generate(*args, **kwargs)

    monkeypatch.setattr(hook, "drain", drain_and_keep)
    monkeypatch.setattr(engine._llm, "generate", plant_and_generate)
    with refused("a commit was refused on the device", EngineError, naming="layer 1: slot_range"):
        run_cell(engine, "stage", "graph", prompts)
    reasons = [window["fallback_reason"] for window in windows]
    staged = reasons.index("device_refused:slot_range")
    assert reasons[:staged] == [None] * staged
    assert set(reasons[staged + 1 :]) == {"staging_stopped"}
    monkeypatch.setattr(engine._llm, "generate", generate)
    again = run_cell(engine, "stage", "graph", prompts)
    assert again.token_ids == stock.token_ids
    assert {window["fallback_reason"] for window in again.windows} == {"staging_stopped"}
