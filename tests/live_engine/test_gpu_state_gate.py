"""The gate of recurrent states, local and end to end, on a GPU, eager and in full graphs, with
float32 and bfloat16 states: sound cells pass, no planted fault does."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tools import EAGER, FULL_FOR_ALL, prompts_of, tiny_spec
from planted_states import CASES, END_TO_END, IN_FORWARD, check_case, check_end_to_end

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PROMPTS = prompts_of([20, 30, 25, 41])

ENGINES: dict[str, dict[str, Any]] = {
    "eager, float32": {**EAGER, "mamba_ssm_cache_dtype": "float32"},
    "full graphs, float32": {**FULL_FOR_ALL, "mamba_ssm_cache_dtype": "float32"},
    "full graphs, bfloat16": {**FULL_FOR_ALL, "mamba_ssm_cache_dtype": "bfloat16"},
}

SURROUNDINGS = {
    "gpu_memory_utilization": 0.2,
    "enable_prefix_caching": False,
    "gdn_prefill_backend": "triton",
}


@pytest.fixture(scope="module", params=ENGINES, ids=list(ENGINES))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """Each engine in turn; a GPU's process holds one at a time."""
    folder = tmp_path_factory.mktemp("states")
    arguments = json.dumps(SURROUNDINGS | ENGINES[request.param])
    spec = tiny_spec(requests=4, kv_cache_gib=0.5, max_model_len=256, engine_args=arguments)
    pair = resolve_pair("tiny-states-mtp", cache_dir=folder)
    made = VllmEngine(pair, spec, Path(folder) / "engine.log")
    try:
        yield made
    finally:
        made.close()
        gc.collect()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("case", CASES)
def test_sound_cells_pass_and_planted_faults_do_not(engine: VllmEngine, case: str) -> None:
    check_case(engine, PROMPTS, case, layers=3)


@pytest.mark.parametrize("case", END_TO_END)
def test_states_are_mode_offs_end_to_end(
    engine: VllmEngine, case: str, request: pytest.FixtureRequest
) -> None:
    if case in IN_FORWARD and "graphs" in request.node.callspec.params["engine"]:
        pytest.skip("the graphs that run were captured without the fault")
    check_end_to_end(engine, PROMPTS, case, layers=3)
