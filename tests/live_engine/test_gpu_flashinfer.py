"""FlashInfer's attention on a GPU: staged without a fallback, and the cache as mode off leaves it.

On a Hopper GPU it serves windows as prefills, with fp8 queries over an fp8 cache, or through XQA as
decodes with bf16 queries. XQA alone has full CUDA graphs of windows. vLLM asks the internet whether
it may use XQA; VLLM_HAS_FLASHINFER_CUBIN is the answer where there is none. FlashInfer compiles its
kernels as they are first used, so there are as few variants here as show both ways.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import EAGER, FULL_FOR_ALL, prompts_of, tiny_spec, total
from kv_gate_tools import kv_results

from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PIECEWISE: dict[str, Any] = {
    "compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
}
KINDS: dict[str, tuple[bool, dict[str, Any], str]] = {
    "prefill-eager-bf16": (False, EAGER, "auto"),
    "prefill-piecewise-fp8": (False, PIECEWISE, "fp8"),
    "xqa-full-bf16": (True, FULL_FOR_ALL, "auto"),
    "xqa-full-fp8": (True, FULL_FOR_ALL, "fp8"),
}
"""Whether XQA may be used, CUDA graphs, cache dtype."""

PROMPTS = prompts_of([130, 21, 290, 33, 61, 150, 40, 577])
SCV = ("off", "graph", "adaptive")


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, VllmEngine]]:
    """A shape without weights in bf16; vLLM cannot hold two engines at a time."""
    pytest.importorskip("flashinfer")
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        pytest.skip("FlashInfer compiles its kernels with nvcc and ninja, which are not here")
    from vllm.utils import flashinfer

    for cached in (flashinfer.has_nvidia_artifactory, flashinfer.supports_trtllm_attention):
        cached.cache_clear()
    xqa, graphs, cache = KINDS[request.param]
    arguments = {
        **graphs,
        "kv_cache_dtype": cache,
        "attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": xqa},
    }
    pair = resolve_pair("qwen-shape", cache_dir=tmp_path_factory.mktemp("pair"))
    spec = tiny_spec(
        draft_tokens=4, max_model_len=1024, max_new_tokens=60, engine_args=json.dumps(arguments)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        started = VllmEngine(pair, spec, None)
        yield request.param, started
        started.close()


def test_windows_are_staged_and_the_cache_is_sound(
    engine: tuple[str, VllmEngine], record_property: Callable[[str, object], None]
) -> None:
    name, started = engine
    status = started.status()
    assert (status.attention_backend, status.staging_unavailable) == ("FlashInferImpl", None)

    def check_staged(output: BatchOutput) -> None:
        assert {window["fallback_reason"] for window in output.windows} == {None}
        assert total(output, "staged_tokens") == total(output, "draft_tokens") > 0

    results = kv_results(
        started, PROMPTS, scv_modes=SCV, max_new_tokens=60, before_check=check_staged
    )
    for scv, result in zip(SCV, results, strict=True):
        record_property(f"{name} {scv}", result.to_dict())
        assert (result.reason, result.verdict) == (None, KvVerdict.WITHIN)
        assert result.checked == result.committed == sum(map(len, PROMPTS)) + 8 * 59


def test_full_graphs_of_windows_are_captured_where_vllm_has_them(
    engine: tuple[str, VllmEngine],
) -> None:
    """Behind the test above: mode stage has captured its own."""
    name, started = engine
    facts = started._rpc("nwor_status")["cuda_graphs"]
    assert facts["stage_unavailable"] is None
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"]
    if not name.startswith("xqa"):
        assert facts["stock_window_sizes"] == []
