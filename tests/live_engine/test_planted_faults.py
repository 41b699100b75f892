"""Every planted fault is caught by the sweep's gate on the CPU, and by the checks that should."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from engine_tools import prompts_of, tiny_spec, worker_of
from planted_faults import FAULTS, RANK_FAULTS, Fault
from planted_gate import SOUND, GateOutcome, Outcomes, run_gate

from nwor_bench.analysis.parity.tokens import ParityRule
from nwor_bench.engine.engine import VllmEngine

pytestmark = pytest.mark.engine

LENGTHS = [24, 31, 18, 40, 27, 22, 35, 29]
SPEC = tiny_spec(block_size=32)
ON_CPU = [fault for fault in FAULTS if fault.cpu is not None]
IN_MAKE_TEST = {
    "one accepted token too few",
    "K and V swapped in one layer",
    "attention misses the window's last row",
    "the drafter's rows are not written",
    "every draft written at once and counted as staged",
    "one row of layer 0 set to 1 at each switch from stage to off",
}
"""One for each check: tokens and counters, K and V, K/V alone, acceptance, writes; and one that
only interleaved batches have."""

GPU_RULES = [ParityRule.EXPLAINED, ParityRule.ACCEPTANCE_ONLY]
"""What a GPU compares by, in place of equal tokens and bits."""


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The column of this file."""
    return Outcomes("cpu")


def gate(
    engine: VllmEngine,
    folder: Path,
    seed: int = 1,
    *,
    interleaved: bool = True,
    rule: ParityRule | None = None,
) -> GateOutcome:
    prompts = prompts_of(LENGTHS, seed)
    outcome = run_gate(engine, SPEC, prompts, folder / "run", interleaved=interleaved, rule=rule)
    assert outcome.staged > 0  # a gate in which nothing is staged would pass everything
    return outcome


def case(fault: Fault) -> Any:
    marks = () if fault.name in IN_MAKE_TEST else pytest.mark.long
    return pytest.param(fault, marks=marks, id=fault.name)


def test_there_are_at_least_16_faults_each_with_a_name_of_its_own() -> None:
    names = [fault.name for fault in (*FAULTS, *RANK_FAULTS)]
    assert len(set(names)) == len(names) >= 16
    assert all(fault.cpu or fault.gpu for fault in FAULTS)
    assert {fault.name for fault in ON_CPU} >= IN_MAKE_TEST


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_a_sound_run_passes(
    engine: VllmEngine, outcomes: Outcomes, tmp_path: Path, seed: int
) -> None:
    outcome = gate(engine, tmp_path, seed)
    outcomes.add(SOUND, outcome)
    assert outcome.reasons == {}


@pytest.mark.parametrize("fault", map(case, ON_CPU))
def test_a_planted_fault_is_caught(
    engine: VllmEngine, outcomes: Outcomes, tmp_path: Path, fault: Fault
) -> None:
    assert fault.cpu is not None
    with fault.cpu(worker_of(engine)):
        outcome = gate(engine, tmp_path, interleaved=fault.interleaved)
    outcomes.add(fault.name, outcome)
    assert outcome.caught == dict.fromkeys(fault.cells, fault.cpu_checks), outcome.reasons
    assert fault.sure <= fault.cpu_checks


@pytest.mark.parametrize("rule", GPU_RULES)
@pytest.mark.parametrize(
    "fault", [None, *(f for f in ON_CPU if f.interleaved)], ids=lambda f: f.name if f else "none"
)
def test_a_gpus_rule_sees_a_switch_fault(
    engine: VllmEngine, tmp_path: Path, fault: Fault | None, rule: ParityRule
) -> None:
    plant = nullcontext() if fault is None or fault.cpu is None else fault.cpu(worker_of(engine))
    with plant:
        outcome = gate(engine, tmp_path, rule=rule)
    assert set(outcome.caught) == (set() if fault is None else set(fault.cells)), outcome.reasons
    for cell, checks in outcome.caught.items():
        assert checks >= {"K/V"}, outcome.reasons
        assert "in interleaved windows" in outcome.reasons[cell][0]


@pytest.mark.long
def test_nothing_stays_of_what_was_planted(engine: VllmEngine, tmp_path: Path) -> None:
    for fault in ON_CPU:
        assert fault.cpu is not None
        with fault.cpu(worker_of(engine)):
            pass
    assert gate(engine, tmp_path, seed=4).reasons == {}
