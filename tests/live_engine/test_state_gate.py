"""The gate of recurrent states, local and end to end, on real vLLM: sound cells pass, no planted
fault does."""

import json
from collections.abc import Callable

import pytest
from engine_tools import prompts_of, tiny_spec
from planted_states import CASES, END_TO_END, check_case, check_end_to_end

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([20, 30, 25, 41])


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    arguments = json.dumps({"enforce_eager": True, "enable_prefix_caching": False})
    spec = tiny_spec(requests=4, kv_cache_gib=0.1, max_model_len=256, engine_args=arguments)
    return start_engine(pair, spec)


@pytest.mark.parametrize("case", CASES)
def test_sound_cells_pass_and_planted_faults_do_not(engine: VllmEngine, case: str) -> None:
    check_case(engine, PROMPTS, case, layers=3)


QUICK = ("sound stage", "sound control", "a rejected draft's state")
"""Cases of `make test`; `make test-all` runs the others too."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.long) for c in END_TO_END]
)
def test_states_are_mode_offs_end_to_end(engine: VllmEngine, case: str) -> None:
    check_end_to_end(engine, PROMPTS, case, layers=3)
