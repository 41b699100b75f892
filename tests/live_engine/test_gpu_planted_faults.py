"""Every planted fault is caught by the sweep's gate on a GPU: real weights, a 3B shape, a hybrid.

One engine start serves all faults; those of staging and attention have the graphs that stage
captured anew. Run with NWOR_BENCH_PLANTED=sweeps/studies/planted-faults to keep the table, and with
`-k "full and not fp8"` for one engine of each kind.
"""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import GRAPHS, pair_with, prompts_of, smollm2_on_short, tiny_spec, worker_of
from planted_faults import ADAPTIVE, FAULTS, REAL, SHAPE, STATE_FAULTS, STATES, Fault
from planted_gate import CELLS, SOUND, GateOutcome, Outcomes, run_gate
from planted_gpu import captured_anew, drop_captures

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.config import RunSpec

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

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
    pair: str
    graphs: str
    cache_dtype: str

    def gate(
        self, folder: Path, seed: int = 1, *, cells: Sequence[str], interleaved: bool = True
    ) -> GateOutcome:
        """The sweep's gate on one set of prompts."""
        outcome = run_gate(
            self.engine, self.spec, self.prompts[seed - 1], folder / "run", self.pair,
            cells=cells, interleaved=interleaved,
        )  # fmt: skip
        assert outcome.staged > 0
        return outcome


EVERY = (*CELLS, *ADAPTIVE)
EIGHT_LAYERS = {"num_hidden_layers": 8}
HYBRID = {"gpu_memory_utilization": 0.2, "enable_prefix_caching": False,
          "gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "bfloat16"}  # fmt: skip

ENGINES = [
    *[(pair, graphs, "auto") for pair in (REAL, SHAPE, STATES) for graphs in reversed(GRAPHS)],
    *[(SHAPE, graphs, "fp8") for graphs in GRAPHS],
]


def subject_of(name: str, graphs: str, cache_dtype: str, folder: Path) -> Subject:
    """Start one engine."""
    arguments, more = {**GRAPHS[graphs], "kv_cache_dtype": cache_dtype}, {"max_model_len": 1024}
    if name == REAL:
        pair, prompts = smollm2_on_short(name, 24)
        sets = [prompts[n : n + 8] for n in (0, 8, 16)]
    elif name == SHAPE:
        pair = replace(pair_with(name, EIGHT_LAYERS, folder), speculative=EVERY_DRAFT_AT_TIMES)
        sets = [prompts_of(LENGTHS, seed) for seed in SEEDS]
    else:
        pair = resolve_pair(name, cache_dir=folder)
        sets = [prompts_of([20, 30, 25, 41], seed) for seed in SEEDS]
        arguments |= HYBRID
        more = {"requests": 4, "kv_cache_gib": 0.5, "max_model_len": 256}
    spec = tiny_spec(draft_tokens=4, engine_args=json.dumps(arguments), **more)
    kind = {REAL: "real", SHAPE: "shape", STATES: "states"}[name]
    outcomes = Outcomes(f"gpu-{kind}-{graphs}" + ("-fp8" if cache_dtype == "fp8" else ""))
    engine = VllmEngine(pair, spec, folder / "engine.log")
    return Subject(engine, spec, sets, outcomes, name, graphs, cache_dtype)


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """Each engine in turn; a GPU's process holds one at a time."""
    made = subject_of(*request.param, tmp_path_factory.mktemp("planted"))
    try:
        yield made
    finally:
        made.engine.close()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_run_passes(subject: Subject, tmp_path: Path, seed: int) -> None:
    outcome = subject.gate(tmp_path, seed, cells=EVERY)
    subject.outcomes.add(SOUND, outcome)
    assert outcome.reasons == {}


@pytest.mark.parametrize(
    "fault",
    [fault for fault in (*FAULTS, *STATE_FAULTS) if fault.gpu is not None],
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_is_caught(subject: Subject, tmp_path: Path, fault: Fault) -> None:
    if subject.pair not in fault.pairs:
        pytest.skip("planted in other models")
    if (fault.cache_dtype == "fp8") != (subject.cache_dtype == "fp8"):
        pytest.skip("planted on the engines of another cache dtype")
    adaptive = fault.cells == ADAPTIVE
    only_graphs = adaptive or fault.sure == {"graphs"}
    if only_graphs and subject.graphs != "full":
        pytest.skip("only captured windows have it")
    assert fault.gpu is not None
    worker = worker_of(subject.engine)
    plant: Callable[..., Any] = fault.gpu
    again = fault.captured and subject.graphs == "full"
    cells = (CELLS[0], *ADAPTIVE) if adaptive else CELLS
    with torch.inference_mode(), captured_anew(worker, plant) if again else plant(worker):
        outcome = subject.gate(tmp_path, cells=cells, interleaved=fault.interleaved)
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
    assert subject.gate(tmp_path, cells=EVERY).reasons == {}
    facts = hook.graph_facts()
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"] != []


def test_the_shape_has_values_at_which_attention_matters(subject: Subject) -> None:
    """K and V of the 3B shape are of order 1 in every layer, and finite."""
    facts = subject.engine.status().dummy_weights
    if subject.pair != SHAPE:
        assert facts is None
        return
    assert facts["target"]["left_alone"] == 0
    for layer in worker_of(subject.engine).nwor_hook.buffers.layers:
        cache = layer.kv_cache
        cache = cache.view(torch.float8_e4m3fn) if cache.element_size() == 1 else cache
        rows = cache[1:5].float()
        assert torch.isfinite(rows).all()
        assert 0.1 < rows[rows != 0].abs().median() < 10
