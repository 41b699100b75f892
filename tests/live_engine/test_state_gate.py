"""The gate of recurrent states, local and end to end, on real vLLM: sound cells pass, no planted
fault does."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from engine_tools import prompts_of, tiny_spec, worker_of
from planted_faults import STATE_FAULTS, Fault
from planted_gate import SOUND, Outcomes, run_gate
from planted_states import CASES, END_TO_END, check_case, check_end_to_end

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([20, 30, 25, 41])
ARGUMENTS = json.dumps({"enforce_eager": True, "enable_prefix_caching": False})
SPEC = tiny_spec(requests=4, kv_cache_gib=0.1, max_model_len=256, engine_args=ARGUMENTS)


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    return start_engine(pair, SPEC)


@pytest.mark.parametrize("case", CASES)
def test_sound_cells_pass_and_planted_faults_do_not(engine: VllmEngine, case: str) -> None:
    check_case(engine, PROMPTS, case, layers=3)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """The column of this file."""
    return Outcomes("cpu-states")


@pytest.mark.parametrize("fault", [None, *(f for f in STATE_FAULTS if f.cpu)],
                         ids=lambda fault: fault.name if fault else "none")  # fmt: skip
@pytest.mark.long
def test_the_whole_gate_sees_every_fault(
    engine: VllmEngine, outcomes: Outcomes, tmp_path: Path, fault: Fault | None
) -> None:
    """Tokens, K/V, states and layers of a plan's cells."""
    plant = fault.cpu(worker_of(engine)) if fault and fault.cpu else nullcontext()
    for on in (True, False):  # what watches is made here: later tests use it outside of that mode
        engine.kv_cache().watch(on)
    with torch.inference_mode(), plant:
        outcome = run_gate(engine, SPEC, PROMPTS, tmp_path / "run", "tiny-states-mtp")
    assert outcome.staged > 0
    outcomes.add(fault.name if fault else SOUND, outcome)
    assert set(outcome.caught) == (set(fault.cells) if fault else set()), outcome.reasons
    for checks in outcome.caught.values():
        assert checks >= {"layers"}, outcome.reasons


QUICK = ("sound stage", "sound control", "a rejected draft's state")
"""Cases of `make test`; `make test-all` runs the others too."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in END_TO_END]
)
def test_states_are_mode_offs_end_to_end(engine: VllmEngine, case: str) -> None:
    check_end_to_end(engine, PROMPTS, case, layers=3)
