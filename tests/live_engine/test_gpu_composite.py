"""vLLM's composite attention (Gemma 4) on a Hopper GPU: staged, the cache as mode off has it.

A small Gemma 3 has its layers, with and without a sliding window, and a head dim that it
takes. Without images its causal part serves every step.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import EAGER, prompts_of, tiny_spec, total
from kv_gate_tools import kv_results
from test_gpu_flashinfer import PIECEWISE, SCV

from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

KINDS: dict[str, dict[str, Any]] = {"eager": EAGER, "piecewise": PIECEWISE}
PROMPTS = prompts_of([130, 21, 690, 33, 61, 150, 40, 577])


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    arguments = {**KINDS[request.param], "attention_config": {"backend": "TRITON_FLASH_ATTN"}}
    pair = resolve_pair("gemma-shape", cache_dir=tmp_path_factory.mktemp("pair"))
    spec = tiny_spec(
        draft_tokens=4, max_model_len=1024, max_new_tokens=60, engine_args=json.dumps(arguments)
    )
    started = VllmEngine(pair, spec, None)
    yield started
    started.close()


def test_windows_are_staged_and_the_cache_is_sound(
    engine: VllmEngine, record_property: Callable[[str, object], None]
) -> None:
    status = engine.status()
    assert (status.attention_backend, status.staging_unavailable) == (
        "CompositeAttentionImpl",
        None,
    )

    def check_staged(output: BatchOutput) -> None:
        assert {window["fallback_reason"] for window in output.windows} == {None}
        assert total(output, "staged_tokens") == total(output, "draft_tokens") > 0

    results = kv_results(
        engine, PROMPTS, scv_modes=SCV, max_new_tokens=60, before_check=check_staged
    )
    for scv, result in zip(SCV, results, strict=True):
        record_property(scv, result.to_dict())
        assert (result.reason, result.verdict) == (None, KvVerdict.WITHIN)
        assert result.checked == result.committed == sum(map(len, PROMPTS)) + 8 * 59
