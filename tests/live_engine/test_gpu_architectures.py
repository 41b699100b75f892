"""Real vLLM on a GPU with several models in float32: every window is staged.

Random weights, and drafts accepted by a draw that is the same in every mode: equal tokens then
say that windows accepted alike and that the target computed the same on what was committed.
Other files compare the cache in bfloat16: test_gpu_kv_gate.py, test_gpu_groups.py, test_gpu_mla.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from checklist_tools import compare, greedy
from engine_tools import EAGER, SCV, prompts_of, tiny_spec

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


def case(row: str, *values: Any) -> Any:
    """A parameter set that stands for a row of the checklist."""
    return pytest.param(*values, marks=pytest.mark.row(row))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        case("Llama", "llama-1b-shape", EAGER),
        case("Qwen", "qwen-shape", EAGER),
        case("mixture of experts", "moe-shape", EAGER),
        # In one group of KV caches, the sliding window is the kernel's business.
        case(
            "Gemma, sliding window, one cache group",
            "gemma-shape",
            {**EAGER, "disable_hybrid_kv_cache_manager": True},
        ),
    ],
)
def test_an_architecture_is_staged(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    pair = resolve_pair(name, cache_dir=tmp_path)
    given = json.dumps(arguments)
    spec = tiny_spec(draft_tokens=4, dtype="float32", max_model_len=1024, engine_args=given)
    engine = VllmEngine(pair, spec, tmp_path / "engine.log")
    try:
        prompts = prompts_of([600, 21, 90, 33, 61, 150, 40, 77])  # one beyond Gemma's window
        stock, _ = compare(engine, prompts, greedy(), SCV)
        assert stock.counters.accepted_tokens > 0
    finally:
        engine.close()
