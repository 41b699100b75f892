"""The checklist's scheduling: preemption, and results that come late."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from checklist_rows import LONG, SMALL_CACHE, check_preemption
from checklist_tools import ask, check_same, greedy
from engine_tools import tiny_pair, tiny_spec, worker_of

from nwor_bench.engine import VllmEngine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """Room for about half of what the eight requests need, and async scheduling asked for."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    small = {**SMALL_CACHE, "async_scheduling": True}
    return start_engine(pair, tiny_spec(block_size=32, engine_args=json.dumps(small)))


@pytest.mark.row("preemption under a small cache")
@pytest.mark.parametrize("scv", ["off", "graph"])
def test_preempted_requests_are_computed_again(
    engine: VllmEngine, scv: str, record_property: Callable[[str, str], None]
) -> None:
    check_preemption(engine, scv)
    record_property("note", "vLLM's V1 engine computes again and swaps nothing out")


@pytest.mark.row("async scheduling")
def test_async_scheduling_is_refused_by_the_cpu_platform(
    engine: VllmEngine, record_property: Callable[[str, str], None]
) -> None:
    """Asked for, vLLM switches it off on a CPU: both settings are the same engine."""
    config = worker_of(engine).vllm_config.scheduler_config
    assert config.async_scheduling is False
    record_property("note", "vLLM switches it off on a CPU")


@pytest.mark.row("async scheduling")
def test_results_that_come_late_are_counted(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Async scheduling's results: sampled ids are there only when the engine asks for them."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    class Late(AsyncModelRunnerOutput):
        def __init__(self, output: Any):
            self._output = output

        def get_output(self) -> Any:
            return self._output

    stock = ask(engine, "off", LONG[:4], greedy())
    in_time = ask(engine, "stage", LONG[:4], greedy())
    runner, hook = worker_of(engine).model_runner, worker_of(engine).nwor_hook
    sample = type(runner).sample_tokens
    hook.detach()
    with monkeypatch.context() as patch:
        late = lambda *args: Late(sample(runner, *args))  # noqa: E731
        patch.setattr(runner, "sample_tokens", late, raising=False)
        hook.attach()
        try:
            staged = ask(engine, "stage", LONG[:4], greedy())
        finally:
            hook.detach()
    hook.attach()
    check_same(engine, staged, stock)
    names = ("draft_tokens", "accepted_tokens", "committed_tokens", "accepted_per_position")
    for late_window, window in zip(staged.windows, in_time.windows, strict=True):
        assert {n: late_window[n] for n in names} == {n: window[n] for n in names}
