"""The local gate on a GPU: sound layers of each kind pass, and faults of one layer are seen."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
from engine_tools import (
    EAGER,
    FULL_FOR_ALL,
    PIECEWISE,
    close,
    prompts_of,
    run_cell,
    tiny_spec,
    worker_of,
)
from planted_layers import LAYER_FAULTS, LayerFault, check_a_batch, keep_sizes, smallest_seen

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.types import Cell, NworMode, ScvMode

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "3B, full graphs": ("llama-3b-shape", FULL_FOR_ALL),
    "gpt-oss 20B, full graphs": ("gpt-oss-20b-shape", FULL_FOR_ALL),
    "Gemma 3 12B, full graphs": ("gemma-3-12b-shape", FULL_FOR_ALL),
    "DeepSeek-V2-Lite, full graphs": ("deepseek-lite-shape", FULL_FOR_ALL),
    "Qwen3-Next, full graphs": (
        "qwen3-next-shape",
        {**FULL_FOR_ALL, "gdn_prefill_backend": "triton"},
    ),
    "3B, fp8 cache, full graphs": ("llama-3b-shape", {**FULL_FOR_ALL, "kv_cache_dtype": "fp8"}),
    "3B, eager": ("llama-3b-shape", EAGER),
    "3B, piecewise": ("llama-3b-shape", PIECEWISE),
}
MEMORY = {"gpu_memory_utilization": 0.2}
"""vLLM checks at start that this part of the GPU is free. Each engine names its cache's size."""
PROMPTS = prompts_of([1100, 1024, 1300, 700, 1024, 1250, 900, 1024])


@dataclass
class Subject:
    """One engine, and the smallest sizes seen on it."""

    engine: VllmEngine
    name: str
    sizes: dict[str, float | None]


@pytest.fixture(scope="module", params=ENGINES, ids=list(ENGINES))
def subject(
    request: pytest.FixtureRequest,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    """Each engine in turn; a GPU's process holds one at a time."""
    name, arguments = ENGINES[request.param]
    folder = tmp_path_factory.mktemp("local")
    arguments = MEMORY | arguments
    spec = tiny_spec(
        draft_tokens=4, max_model_len=2048, engine_args=json.dumps(arguments), requests=8
    )
    engine = start_engine(resolve_pair(name, cache_dir=folder), spec)
    yield Subject(engine, request.param, {})
    close(engine)


@pytest.mark.parametrize(
    "cell", [("stage", "off"), ("stage", "graph"), ("stage", "adaptive"), ("control", "off")]
)
def test_sound_layers_pass(subject: Subject, cell: tuple[str, str]) -> None:
    began = perf_counter()
    found = check_a_batch(subject.engine, PROMPTS, *cell)
    print(f"\n{subject.name} {cell}: {perf_counter() - began:.2f} s, {found}")
    assert found.verdict is KvVerdict.WITHIN, found.reason
    assert found.layers == found.attended > 0
    if "full" in subject.name:
        assert "full graph" in found.paths


def test_the_checking_graph_gives_the_timed_graphs_output(subject: Subject) -> None:
    if "full" not in subject.name:
        pytest.skip("no full graphs")
    engine = subject.engine
    engine.set_modes(Cell("tiny", NworMode.STAGE, ScvMode.GRAPH))
    engine.check_layers(8)
    run_cell(engine, "stage", "graph", PROMPTS, 16)
    graphs = [window["graphs"] for window in engine.check_layers(None)[0]]
    print(f"\n{subject.name}: {graphs}")
    assert any(each is not None for each in graphs)
    assert all(each is None or each["repeated"] or not each["checking"] for each in graphs)


@pytest.mark.parametrize("fault", LAYER_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_one_layer_is_seen(subject: Subject, fault: LayerFault) -> None:
    if not fault.applies(worker_of(subject.engine)):
        pytest.skip("no such layer")
    smallest, reason = smallest_seen(subject.engine, PROMPTS, fault)
    print(f"\n{subject.name} {fault.name}: {smallest} {reason}")
    subject.sizes[fault.name] = smallest
    keep_sizes(subject.name, subject.sizes)
    assert smallest is not None
    assert smallest <= fault.must
