"""Every planted fault is caught by the sweep's gate: on the CPU by exactly the checks that should,
on a GPU by those of `sure` at least, with real weights, a 3B shape and a hybrid.

One engine start serves all faults. Run with NWOR_BENCH_PLANTED=sweeps/studies/planted-faults for
the table; on a GPU with `-k "full and not fp8"` for one engine of each kind.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import (
    GRAPHS,
    close,
    pair_with,
    prompts_of,
    run_cell,
    smollm2_on_short,
    tiny_pair,
    tiny_spec,
    worker_of,
)
from planted_faults import (
    ADAPTIVE,
    FAULTS,
    RANK_FAULTS,
    REAL,
    SHAPE,
    STATE_FAULTS,
    STATES,
    Fault,
)
from planted_gate import CELLS, SOUND, GateOutcome, Outcomes, run_gate
from planted_parts import captured_anew, drop_captures

from nwor_bench.analysis.parity.tokens import ParityRule
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.config import RunSpec

pytestmark = pytest.mark.engine

Start = Callable[..., VllmEngine]

SEEDS = (1, 2, 3)
EVERY = (*CELLS, *ADAPTIVE)
EVERY_DRAFT_AT_TIMES = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.9, 0.75, 0.6, 0.5],
}
"""The shape's own 2.6 tokens a window are rates of 1, 0.6, 0 and 0: drafts 3 and 4 are never
accepted, so no check of the cache could see a fault in their rows."""
HYBRID = {"gpu_memory_utilization": 0.2, "enable_prefix_caching": False,
          "gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "bfloat16"}  # fmt: skip
IN_MAKE_TEST = {
    "one accepted token too few",
    "K and V swapped in one layer",
    "attention misses the window's last row",
    "the drafter's rows are not written",
    "rejected drafts written too at long context",
    "one row of layer 0 set to 1 at each switch from stage to off",
}
"""One for each check: tokens and counters, K and V, K/V alone, acceptance, writes; and one that
only interleaved batches have."""


@dataclass(frozen=True)
class Setting:
    """One engine: its pair ("tiny" on the CPU), graphs and cache dtype."""

    pair: str = "tiny"
    graphs: str = "eager"
    cache_dtype: str = "auto"

    def __str__(self) -> str:
        """The node's name."""
        return "cpu" if self == CPU else f"{self.pair}-{self.graphs}-{self.cache_dtype}"

    @property
    def column(self) -> str:
        """The engine's name in outcomes.csv."""
        kind = {REAL: "real", SHAPE: "shape", STATES: "states"}.get(self.pair, "")
        fp8 = "-fp8" if self.cache_dtype == "fp8" else ""
        return f"gpu-{kind}-{self.graphs}{fp8}" if kind else "cpu"

    def has(self, fault: Fault) -> bool:
        """True if the fault can be planted and seen here."""
        if self == CPU:
            return "V1" in fault.runners and fault in FAULTS
        only_captured = fault.cells == ADAPTIVE or fault.sure == {"graphs"}
        return (
            "V2" in fault.runners
            and self.pair in fault.pairs
            and (fault.cache_dtype == "fp8") == (self.cache_dtype == "fp8")
            and (self.graphs == "full" or not only_captured)
        )


CPU = Setting()
ON_GPU = [
    *(Setting(pair, graphs) for pair in (REAL, SHAPE, STATES) for graphs in reversed(GRAPHS)),
    *(Setting(SHAPE, graphs, "fp8") for graphs in GRAPHS),
]
SETTINGS = [CPU, *ON_GPU]


@dataclass(frozen=True)
class Subject:
    """A running engine with its prompts: three sets."""

    setting: Setting
    engine: VllmEngine
    spec: RunSpec
    prompts: list[list[list[int]]]
    outcomes: Outcomes

    def gate(self, folder: Path, seed: int = 1, **more: Any) -> GateOutcome:
        """The sweep's gate on one set of prompts, interleaved too if nothing else is said."""
        outcome = run_gate(
            self.engine, self.spec, self.prompts[seed - 1], folder / "run", self.setting.pair,
            **{"interleaved": True, **more},
        )  # fmt: skip
        assert outcome.staged > 0  # a gate in which nothing is staged would pass everything
        return outcome


def subject_of(setting: Setting, folder: Path, start: Start) -> Subject:
    """Start one engine."""
    lengths = [400, 131, 90, 233, 61, 350, 140, 77]
    arguments, more = {**GRAPHS[setting.graphs], "kv_cache_dtype": setting.cache_dtype}, {}
    if setting == CPU:
        pair, lengths = tiny_pair(folder, "draft_model"), [24, 31, 18, 40, 27, 22, 35, 29]
        arguments, more = {}, {"block_size": 32}
    elif setting.pair == REAL:
        pair, prompts = smollm2_on_short(setting.pair, 24)
    elif setting.pair == SHAPE:
        shape = pair_with(setting.pair, {"num_hidden_layers": 8}, folder)
        pair = replace(shape, speculative=EVERY_DRAFT_AT_TIMES)
    else:
        pair, lengths = resolve_pair(setting.pair, cache_dir=folder), [20, 30, 25, 41]
        arguments |= HYBRID
        more = {"requests": 4, "kv_cache_gib": 0.5, "max_model_len": 256}
    if setting != CPU:
        more = {"draft_tokens": 4, "max_model_len": 1024, **more}
    spec = tiny_spec(engine_args=json.dumps(arguments), **more)
    sets = [prompts_of(lengths, seed) for seed in SEEDS]
    if setting.pair == REAL:
        sets = [prompts[n : n + 8] for n in (0, 8, 16)]
    return Subject(setting, start(pair, spec), spec, sets, Outcomes(setting.column))


def case(setting: Setting) -> Any:
    """An engine as a parameter."""
    return pytest.param(setting, marks=[pytest.mark.gpu] * (setting != CPU), id=str(setting))


@pytest.fixture(scope="module", params=map(case, SETTINGS))
def subject(
    request: pytest.FixtureRequest, start_engine: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    """One engine after another; a GPU's process holds one at a time."""
    made = subject_of(request.param, tmp_path_factory.mktemp("planted"), start_engine)
    yield made
    close(made.engine)


def on(*settings: Setting) -> pytest.MarkDecorator:
    """Run a test on these engines."""
    return pytest.mark.parametrize("subject", map(case, settings), indirect=True)


def with_faults(*faults: Fault) -> pytest.MarkDecorator:
    """Run a test with these faults; most are for `make test-all` alone."""
    cases = [pytest.param(fault, id=fault.name,
                          marks=[pytest.mark.long] * (fault.name not in IN_MAKE_TEST))
             for fault in faults]  # fmt: skip
    return pytest.mark.parametrize("fault", cases)


def test_there_are_at_least_16_faults_each_with_a_name_of_its_own() -> None:
    names = [fault.name for fault in (*FAULTS, *STATE_FAULTS, *RANK_FAULTS)]
    assert len(set(names)) == len(names) >= 16
    assert {fault.name for fault in FAULTS if CPU.has(fault)} >= IN_MAKE_TEST
    for fault in (*FAULTS, *STATE_FAULTS):
        assert any(setting.has(fault) for setting in SETTINGS)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 3))])
def test_a_sound_run_passes(subject: Subject, tmp_path: Path, seed: int) -> None:
    cells = CELLS if subject.setting == CPU else EVERY
    outcome = subject.gate(tmp_path, seed, cells=cells)
    subject.outcomes.add(SOUND, outcome)
    assert outcome.reasons == {}


@with_faults(*FAULTS, *STATE_FAULTS)
def test_a_planted_fault_is_caught(subject: Subject, tmp_path: Path, fault: Fault) -> None:
    if not subject.setting.has(fault):
        pytest.skip("planted on other engines")
    worker, on_cpu = worker_of(subject.engine), subject.setting == CPU
    again = fault.captured and subject.setting.graphs == "full"
    cells = (CELLS[0], *ADAPTIVE) if fault.cells == ADAPTIVE else CELLS
    plant = captured_anew(worker, fault.plant) if again else fault.plant(worker)
    with nullcontext() if on_cpu else torch.inference_mode(), plant:
        outcome = subject.gate(tmp_path, cells=cells, interleaved=fault.interleaved)
        assert not again or worker.nwor_hook.graphs.unavailable is None
    subject.outcomes.add(fault.name, outcome)
    if on_cpu:
        assert outcome.caught == dict.fromkeys(fault.cells, fault.cpu_checks), outcome.reasons
    assert set(outcome.caught) == set(fault.cells), outcome.reasons
    for cell in fault.cells:
        assert fault.sure <= outcome.caught[cell], outcome.reasons


@on(CPU)
@pytest.mark.parametrize(
    "rule",
    [ParityRule.EXPLAINED, pytest.param(ParityRule.ACCEPTANCE_ONLY, marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "fault", [None, *(f for f in FAULTS if f.interleaved)], ids=lambda f: f.name if f else "none"
)
def test_a_gpus_rule_sees_a_switch_fault(
    subject: Subject, tmp_path: Path, fault: Fault | None, rule: ParityRule
) -> None:
    """What a GPU compares by, in place of equal tokens and bits."""
    plant = nullcontext() if fault is None else fault.plant(worker_of(subject.engine))
    with plant:
        outcome = subject.gate(tmp_path, rule=rule)
    assert set(outcome.caught) == (set() if fault is None else set(fault.cells)), outcome.reasons
    for cell, checks in outcome.caught.items():
        assert checks >= {"K/V"}, outcome.reasons
        assert "in interleaved windows" in outcome.reasons[cell][0]


@on(CPU)
@pytest.mark.long
def test_nothing_stays_of_what_was_planted(subject: Subject, tmp_path: Path) -> None:
    for fault in FAULTS:
        if CPU.has(fault):
            with fault.plant(worker_of(subject.engine)):
                pass
    assert subject.gate(tmp_path, seed=3).reasons == {}


@on(*(setting for setting in ON_GPU if setting.graphs == "full"))
def test_graphs_captured_anew_are_sound_again(subject: Subject, tmp_path: Path) -> None:
    hook = worker_of(subject.engine).nwor_hook
    drop_captures(worker_of(subject.engine))
    assert subject.gate(tmp_path, cells=EVERY).reasons == {}
    facts = hook.graph_facts()
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"] != []


@on(*(setting for setting in ON_GPU if setting.pair == SHAPE))
def test_the_shape_has_values_at_which_attention_matters(subject: Subject) -> None:
    """K and V of the 3B shape are of order 1 in every layer, and finite."""
    run_cell(subject.engine, "off", "off", subject.prompts[0], 4)
    facts = subject.engine.status().dummy_weights
    assert facts is not None
    assert facts["target"]["left_alone"] == 0
    for layer in worker_of(subject.engine).nwor_hook.buffers.layers:
        cache = layer.kv_cache
        cache = cache.view(torch.float8_e4m3fn) if cache.element_size() == 1 else cache
        rows = cache[1:5].float()
        assert torch.isfinite(rows).all()
        assert 0.1 < rows[rows != 0].abs().median() < 10
