"""The K/V gate on engines of many kinds: sound ones pass, a wrong element is named.

On a GPU eager and full CUDA graphs, bf16 and fp8, with weights drawn at random and synthetic
acceptance: tokens follow the draw and the two modes may answer differently, so that the cache is
the only thing that can be compared.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checklist_rows import SMALL_CACHE
from checklist_tools import metric
from engine_tools import GRAPHS, check_every_draft_staged, prompts_of, tiny_pair, tiny_spec
from kv_gate_tools import change_a_value, check_whole, kv_results
from rank_faults import on_ranks
from shape_tools import NEW_TOKENS, check_kv_gate, shape_engine

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])
SHARED = [[*range(40, 140), *prompt] for prompt in PROMPTS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "arguments", "counter", "prompts", "tokens"),
    [
        pytest.param("draft_model", {"max_num_batched_tokens": 64}, "vllm:prefix_cache_hits",
                     SHARED, 40, id="prefix hits and chunks"),
        # A request that was preempted is computed again in other blocks, and these are compared.
        pytest.param("draft_model", SMALL_CACHE, "vllm:num_preemptions", PROMPTS, 100,
                     id="preempted"),
        # vLLM then gives the blocks that were freed last to the next request at once.
        pytest.param("ngram", {"enable_prefix_caching": False, "max_num_seqs": 3}, None,
                     PROMPTS, 40, id="without prefix caching"),
    ],
)  # fmt: skip
def test_a_cpus_engines_are_sound(
    method: str,
    arguments: dict[str, Any],
    counter: str | None,
    prompts: list[list[int]],
    tokens: int,
    start_alone: Callable[..., VllmEngine],
    tmp_path: Path,
) -> None:
    """Bit for bit, and with the tolerances of a GPU; `counter` of vLLM's rises."""
    spec = tiny_spec(block_size=32, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path, method), spec)
    before = metric(engine, counter) if counter else 0
    committed = sum(map(len, prompts)) + len(prompts) * (tokens - 1)
    for one_attention in (True, False):
        (result,) = kv_results(engine, prompts, one_attention=one_attention, max_new_tokens=tokens)
        check_whole(result, committed)
        assert result.verdict is (KvVerdict.EXACT if one_attention else KvVerdict.WITHIN)
    assert counter is None or metric(engine, counter) > before


KINDS = [
    pytest.param(
        {**GRAPHS[graphs], "kv_cache_dtype": cache}, id=f"{graphs}-{cache}",
        marks=[pytest.mark.gpu] + [pytest.mark.row("fp8 cache")] * (cache == "fp8"),
    )
    for graphs in ("eager", "full")
    for cache in ("auto", "fp8")
]  # fmt: skip
RANDOM_PROMPTS = prompts_of([130, 21, 290, 33, 61, 150, 40, 577])


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    with shape_engine("qwen-shape", request.param, tmp_path_factory.mktemp("pair")) as started:
        yield started


def test_sound_modes_are_within_the_error_of_mode_off_itself(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    check_kv_gate(engine, RANDOM_PROMPTS, record_property, before_check=check_every_draft_staged)


@pytest.mark.parametrize("head", [0, -1])
def test_a_wrong_element_is_named(engine: VllmEngine, head: int) -> None:
    """One K element in the last layer is off by several times the row's norm."""
    status = engine.status()
    layer, request, position = status.target_layers - 1, 2, len(RANDOM_PROMPTS[2]) + 30
    head = head % status.kv_heads

    def plant(output: BatchOutput) -> None:
        torch.cuda.synchronize()
        for _ in range(8):
            on_ranks(engine, change_a_value, layer, request, position, 5, head, 0)

    (result,) = kv_results(engine, RANDOM_PROMPTS, before_check=plant, max_new_tokens=NEW_TOKENS)
    assert result.reason is not None
    assert result.reason.startswith(f"K/V: layer {layer} ")
    assert f"request {request}, position {position} (of its output), K, head {head}:" in (
        result.reason
    )
