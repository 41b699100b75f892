"""The checklist on engines of their own: draft methods, drafts by batch size, LoRA, preemption.

What vLLM's CPU build cannot run is in test_gpu_methods.py, or refused by name: ngram_gpu pins
memory, suffix decoding needs a package that is not installed, DSpark and block verification are
the V2 runner's.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import (
    ONE_LONG,
    SCHEDULE,
    SMALL_CACHE,
    check_adapter,
    check_drafter,
    check_preemption,
    check_schedule,
)
from checklist_tools import check_cache, check_support
from engine_tools import tiny_pair, tiny_spec, worker_of
from tiny_drafters import eagle3_pair, mtp_pair, speculators_pair

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(eagle3_pair, marks=pytest.mark.row("eagle3"), id="eagle3"),
        pytest.param(speculators_pair, marks=pytest.mark.row("eagle3"), id="speculators"),
        pytest.param(mtp_pair, marks=pytest.mark.row("mtp"), id="mtp"),
    ],
)
def test_a_drafter_in_the_targets_cache_group(
    build: Callable[[Path], ResolvedPair], tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    pair, spec = build(tmp_path), tiny_spec(block_size=32)
    engine = start_engine(pair, spec)
    check_support(Path(pair.target), engine.status(), spec, pair.method)
    check_drafter(engine, ["off", "graph"])


@pytest.mark.row("LoRA")
def test_an_adapter(tmp_path: Path, start_engine: Callable[..., VllmEngine]) -> None:
    """In a batch with both, stock vLLM 0.32 gives every request the adapter on a CPU."""
    pair = tiny_pair(tmp_path / "pair", "ngram")
    arguments = json.dumps({"enable_lora": True, "max_lora_rank": 8})
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=arguments))
    check_adapter(engine, pair.target, tmp_path / "lora", ["off", "graph"], fallback=None)


def test_drafts_whose_number_follows_the_batch(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    spec = tiny_spec(draft_tokens=4, block_size=32, speculative_config=json.dumps(SCHEDULE))
    engine = start_engine(tiny_pair(tmp_path, "draft_model"), spec)
    check_cache(engine, ONE_LONG, check_schedule(engine, ("off", "graph")))


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
