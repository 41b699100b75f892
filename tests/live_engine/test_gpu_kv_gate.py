"""The K/V gate on a GPU: eager and full CUDA graphs, bf16 and fp8, weights drawn at random.

Synthetic acceptance: tokens follow the draw and the two modes may answer differently, so that the
cache is the only thing that can be compared.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engine_tools import EAGER, FULL_FOR_ALL, prompts_of, tiny_spec
from kv_gate_tools import change_a_value, kv_results
from rank_faults import on_ranks

from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

KINDS = [(graphs, cache) for graphs in ("eager", "full") for cache in ("auto", "fp8")]
GRAPHS: dict[str, dict[str, Any]] = {"eager": EAGER, "full": FULL_FOR_ALL}
PROMPTS = prompts_of([130, 21, 290, 33, 61, 150, 40, 577])
SCV = ("off", "graph", "adaptive")


def arguments_of(graphs: str, cache: str) -> str:
    return json.dumps({**GRAPHS[graphs], "kv_cache_dtype": cache})


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """A shape without weights in bf16; vLLM cannot hold two engines at a time."""
    pair = resolve_pair("qwen-shape", cache_dir=tmp_path_factory.mktemp("pair"))
    spec = tiny_spec(
        draft_tokens=4,
        max_model_len=1024,
        max_new_tokens=60,
        engine_args=arguments_of(*request.param),
    )
    started = VllmEngine(pair, spec, None)
    yield started
    started.close()


def test_sound_modes_are_within_the_error_of_mode_off_itself(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    for scv, result in zip(
        SCV, kv_results(engine, PROMPTS, scv_modes=SCV, max_new_tokens=60), strict=True
    ):
        record_property(scv, result.to_dict())
        assert result.reason is None
        assert result.verdict is KvVerdict.WITHIN
        assert result.checked == result.committed == sum(map(len, PROMPTS)) + 8 * 59


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

    (result,) = kv_results(engine, PROMPTS, before_check=plant, max_new_tokens=60)
    assert result.reason is not None
    assert result.reason.startswith(f"K/V: layer {layer} ")
    assert f"request {request}, position {position} (of its output), K, head {head}:" in (
        result.reason
    )
