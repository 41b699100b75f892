"""Real vLLM on a GPU with what cannot be staged: it starts, says why, and answers as without us.

Random weights from a configuration alone. "Without us" is the same engine with the hooks taken
off, all of its methods being vLLM's own again.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import prompts_of, run_cell, tiny_pair, tiny_spec, total
from tiny_hybrids import EAGER_DUMMY, hybrid_pair

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


def check_refused(engine: VllmEngine, reason: str, prompts: list[list[int]]) -> None:
    """In every mode the tokens are those of vLLM alone, and each window has its reason."""
    status = engine.status()
    assert status.staging_unavailable == reason
    engine.set_hooks(False)
    alone = run_cell(engine, "off", "off", prompts, 24)
    assert alone.windows == []
    engine.set_hooks(True)
    for nwor, scv in (("off", "off"), ("stage", "off"), ("stage", "graph")):
        output = run_cell(engine, nwor, scv, prompts, 24)
        assert output.token_ids == alone.token_ids
        expected = reason if nwor == "stage" else None
        assert {window.fallback_reason for window in output.windows} == {expected}
        assert total(output, "staged_tokens") == 0
        assert total(output, "draft_tokens") > 0


@pytest.mark.parametrize("family", ["Mamba", "Mamba 2"])
def test_a_model_without_attention_runs_as_without_us_and_says_why(
    family: str, tmp_path: Path, start_alone: Callable[..., VllmEngine]
) -> None:
    pair = hybrid_pair(tmp_path / "model", family, "bfloat16")
    # A state takes a whole page of the cache, which the byte model of K/V does not know.
    spec = tiny_spec(requests=2, kv_cache_gib=0.5, engine_args=json.dumps(EAGER_DUMMY))
    check_refused(start_alone(pair, spec), "recurrent_layers", prompts_of([20, 30]))


SIZES = {"cudagraph_capture_sizes": [5, 10]}


@pytest.mark.parametrize(
    ("compilation", "reason"),
    [
        ({"mode": 3, "use_inductor_graph_partition": True}, "inductor_graph_partition"),
        (
            {"mode": 3, "splitting_ops": [], "cudagraph_mode": "FULL_DECODE_ONLY"},
            "whole_graph_compilation",
        ),
        ({"mode": 2, "cudagraph_mode": "NONE"}, "whole_graph_compilation"),
        ({"mode": 1, "cudagraph_mode": "NONE"}, "whole_graph_compilation"),
    ],
)
def test_code_that_hides_the_write_runs_as_without_us_and_says_why(
    compilation: dict[str, Any],
    reason: str,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
) -> None:
    arguments = {"compilation_config": {**SIZES, **compilation}}
    spec = tiny_spec(requests=2, draft_tokens=4, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path / "model", "ngram"), spec)
    check_refused(engine, reason, prompts_of([20, 30]))
