"""Every planted fault is caught by the sweep's gate on a GPU: real weights and a 3B shape.

One engine start serves all faults; those of staging and attention have the graphs that stage
captured anew. Run with NWOR_BENCH_PLANTED_JSON=sweeps/studies/planted-faults to keep the table.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import (
    GRAPHS,
    prompts_of,
    smollm2_on_short,
    tiny_spec,
    worker_of,
)
from planted_faults import FAULTS, Fault
from planted_gate import SOUND, GateOutcome, Outcomes, recorded, run_gate
from planted_gpu import captured_anew, drop_captures

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.config import RunSpec

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

REAL, SHAPE = "smollm2", "llama-3b-shape"
EVERY_DRAFT_AT_TIMES = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.9, 0.75, 0.6, 0.5],
}
"""The shape's own 2.6 tokens a window are rates of 1, 0.6, 0 and 0: drafts 3 and 4 are never
accepted, so no check of the cache could see a fault in their rows."""
LENGTHS = [400, 131, 90, 233, 61, 350, 140, 77]
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Subject:
    """One engine with its prompts: three sets of eight."""

    engine: VllmEngine
    spec: RunSpec
    prompts: list[list[list[int]]]
    outcomes: Outcomes
    graphs: str
    cache_dtype: str

    def gate(self, folder: Path, seed: int = 1, *, interleaved: bool = True) -> GateOutcome:
        """The sweep's gate on one set of prompts."""
        pair = self.engine.pair_name  # type: ignore[attr-defined]
        prompts = self.prompts[seed - 1]
        outcome = run_gate(
            self.engine, self.spec, prompts, folder / "run", pair, interleaved=interleaved
        )
        assert outcome.staged > 0
        return outcome


ENGINES = [
    *[(pair, graphs, "auto") for pair in (REAL, SHAPE) for graphs in GRAPHS],
    *[(SHAPE, graphs, "fp8") for graphs in GRAPHS],
]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """Each engine in turn; a GPU's process holds one at a time."""
    name, graphs, cache_dtype = request.param
    folder = tmp_path_factory.mktemp("planted")
    if name == REAL:
        pair, prompts = smollm2_on_short(name, 24)
        sets = [prompts[n : n + 8] for n in (0, 8, 16)]
    else:
        pair = replace(resolve_pair(name, cache_dir=folder), speculative=EVERY_DRAFT_AT_TIMES)
        sets = [prompts_of(LENGTHS, seed) for seed in SEEDS]
    arguments = {**GRAPHS[graphs], "kv_cache_dtype": cache_dtype}
    spec = tiny_spec(draft_tokens=4, max_model_len=1024, engine_args=json.dumps(arguments))
    engine = VllmEngine(pair, spec, folder / "engine.log")
    engine.pair_name = pair.name  # type: ignore[attr-defined]
    kind = "real" if name == REAL else "shape"
    try:
        with recorded(f"h200-{kind}-{graphs}") as outcomes:
            yield Subject(engine, spec, sets, outcomes, graphs, cache_dtype)
    finally:
        engine.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_run_passes(subject: Subject, tmp_path: Path, seed: int) -> None:
    outcome = subject.gate(tmp_path, seed)
    subject.outcomes.add(SOUND, outcome)
    assert outcome.reasons == {}


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.gpu is not None], ids=lambda fault: fault.name
)
def test_a_planted_fault_is_caught(subject: Subject, tmp_path: Path, fault: Fault) -> None:
    if (fault.cache_dtype == "fp8") != (subject.cache_dtype == "fp8"):
        pytest.skip("planted on the engines of another cache dtype")
    assert fault.gpu is not None
    worker = worker_of(subject.engine)
    plant: Callable[..., Any] = fault.gpu
    again = fault.captured and subject.graphs == "full"
    with captured_anew(worker, plant) if again else plant(worker):
        outcome = subject.gate(tmp_path, interleaved=fault.interleaved)
        if again:
            assert worker.nwor_hook.graphs.unavailable is None
    subject.outcomes.add(fault.name, outcome)
    assert set(outcome.caught) == set(fault.cells), outcome.reasons
    for cell in fault.cells:
        assert fault.sure <= outcome.caught[cell], outcome.reasons


def test_graphs_captured_anew_are_sound_again(subject: Subject, tmp_path: Path) -> None:
    if subject.graphs != "full":
        pytest.skip("there are no graphs")
    hook = worker_of(subject.engine).nwor_hook
    drop_captures(worker_of(subject.engine))
    assert subject.gate(tmp_path).reasons == {}
    facts = hook.graph_facts()
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"] != []


def test_the_shape_has_values_at_which_attention_matters(subject: Subject) -> None:
    """K and V of the 3B shape are of order 1 in every layer, and finite."""
    facts = subject.engine.status().dummy_weights
    if "shape" not in subject.outcomes.column:
        assert facts is None
        return
    assert facts["target"]["left_alone"] == 0
    for layer in worker_of(subject.engine).nwor_hook.buffers.layers:
        cache = layer.kv_cache
        cache = cache.view(torch.float8_e4m3fn) if cache.element_size() == 1 else cache
        rows = cache[1:5].float()
        assert torch.isfinite(rows).all()
        assert 0.1 < rows[rows != 0].abs().median() < 10
