"""The K/V gate on a GPU: eager and full CUDA graphs, bf16 and fp8, weights drawn at random.

Synthetic acceptance: tokens follow the draw and the two modes may answer differently, so that the
cache is the only thing that can be compared.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_tools import GRAPHS, check_every_draft_staged, prompts_of
from kv_gate_tools import change_a_value, kv_results
from rank_faults import on_ranks
from shape_tools import NEW_TOKENS, check_kv_gate, shape_engine

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

KINDS = [(graphs, cache) for graphs in ("eager", "full") for cache in ("auto", "fp8")]
PROMPTS = prompts_of([130, 21, 290, 33, 61, 150, 40, 577])


def arguments_of(graphs: str, cache: str) -> dict[str, Any]:
    """vLLM's arguments of one kind."""
    return {**GRAPHS[graphs], "kv_cache_dtype": cache}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.row("fp8 cache")] * (kind[1] == "fp8"))
        for kind in KINDS
    ],
    ids="-".join,
)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    arguments = arguments_of(*request.param)
    with shape_engine("qwen-shape", arguments, tmp_path_factory.mktemp("pair")) as started:
        yield started


def test_sound_modes_are_within_the_error_of_mode_off_itself(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    check_kv_gate(engine, PROMPTS, record_property, before_check=check_every_draft_staged)


@pytest.mark.parametrize("head", [0, -1])
def test_a_wrong_element_is_named(engine: VllmEngine, head: int) -> None:
    """One K element in the last layer is off by several times the row's norm."""
    status = engine.status()
    layer, request, position = status.target_layers - 1, 2, len(PROMPTS[2]) + 30
    head = head % status.kv_heads

    def plant(output: BatchOutput) -> None:
        torch.cuda.synchronize()
        for _ in range(8):
            on_ranks(engine, change_a_value, layer, request, position, 5, head, 0)

    (result,) = kv_results(engine, PROMPTS, before_check=plant, max_new_tokens=NEW_TOKENS)
    assert result.reason is not None
    assert result.reason.startswith(f"K/V: layer {layer} ")
    assert f"request {request}, position {position} (of its output), K, head {head}:" in (
        result.reason
    )
