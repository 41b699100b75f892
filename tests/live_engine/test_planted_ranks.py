"""Faults planted on one of two tensor-parallel ranks are caught by the sweep's gate on the CPU."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import rank_faults
from engine_tools import prompts_of, tiny_pair, tiny_spec
from planted_faults import RANK_FAULTS, RankFault
from planted_gate import GateOutcome, Outcomes, run_gate

from nwor_bench.engine.engine import VllmEngine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors"),
]

LENGTHS = [24, 31, 18, 40, 27, 22, 35, 29]
SPEC = tiny_spec(block_size=32, tensor_parallel_size=2, kv_cache_gib=0.1)


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """A draft model with partial acceptance, on two ranks."""
    return start_engine(tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model"), SPEC)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The column of the CPU."""
    return Outcomes("cpu")


def gate(engine: VllmEngine, folder: Path, seed: int = 1) -> GateOutcome:
    outcome = run_gate(engine, SPEC, prompts_of(LENGTHS, seed), folder / "run")
    assert outcome.staged > 0
    return outcome


@pytest.mark.parametrize("fault", RANK_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_on_one_rank_is_caught(
    engine: VllmEngine, outcomes: Outcomes, tmp_path: Path, fault: RankFault
) -> None:
    with rank_faults.planted(engine, getattr(rank_faults, fault.plant), rank=1):
        outcome = gate(engine, tmp_path)
    outcomes.add(fault.name, outcome)
    assert outcome.caught == dict.fromkeys(fault.cells, fault.checks), outcome.reasons


def test_two_sound_ranks_pass(engine: VllmEngine, tmp_path: Path) -> None:
    assert gate(engine, tmp_path, seed=2).reasons == {}
