"""vLLM's composite attention (Gemma 4) on a Hopper GPU: staged, the cache as mode off has it.

A small Gemma 3 has its layers, with and without a sliding window, and a head dim that it
takes. Without images its causal part serves every step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import EAGER, PIECEWISE, check_every_draft_staged, prompts_of
from shape_tools import check_kv_gate, shape_engine

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

KINDS: dict[str, dict[str, Any]] = {"eager": EAGER, "piecewise": PIECEWISE}
PROMPTS = prompts_of([130, 21, 690, 33, 61, 150, 40, 577])


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    arguments = {**KINDS[request.param], "attention_config": {"backend": "TRITON_FLASH_ATTN"}}
    with shape_engine("gemma-shape", arguments, tmp_path_factory.mktemp("pair")) as started:
        yield started


def test_windows_are_staged_and_the_cache_is_sound(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    status = engine.status()
    assert (status.attention_backend, status.staging_unavailable) == (
        "CompositeAttentionImpl",
        None,
    )
    check_kv_gate(engine, PROMPTS, record_property, before_check=check_every_draft_staged)
