"""The checklist's scheduling: preemption, and results that come late."""

import json
from collections.abc import Callable

import pytest
from checklist_rows import SMALL_CACHE, check_preemption
from engine_tools import tiny_pair, tiny_spec, worker_of

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.long]


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
    """Asked for, vLLM switches it off on a CPU; test_async_scheduling.py has it nevertheless."""
    config = worker_of(engine).vllm_config.scheduler_config
    assert config.async_scheduling is False
    record_property("note", "vLLM switches it off on a CPU")
