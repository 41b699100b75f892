"""FlashInfer's attention on a GPU: staged without a fallback, and the cache as mode off leaves it.

On a Hopper GPU it serves windows as prefills, with fp8 queries over an fp8 cache, or through XQA as
decodes with bf16 queries. XQA alone has full CUDA graphs of windows. vLLM asks the internet whether
it may use XQA; VLLM_HAS_FLASHINFER_CUBIN is the answer where there is none. FlashInfer compiles its
kernels as they are first used, so there are as few variants here as show both ways.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import EAGER, FULL_FOR_ALL, PIECEWISE, check_every_draft_staged, prompts_of
from shape_tools import check_kv_gate, shape_engine

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

KINDS: dict[str, tuple[bool, dict[str, Any], str]] = {
    "prefill-eager-bf16": (False, EAGER, "auto"),
    "prefill-piecewise-fp8": (False, PIECEWISE, "fp8"),
    "xqa-full-bf16": (True, FULL_FOR_ALL, "auto"),
    "xqa-full-fp8": (True, FULL_FOR_ALL, "fp8"),
}
"""Whether XQA may be used, CUDA graphs, cache dtype."""

PROMPTS = prompts_of([130, 21, 290, 33, 61, 150, 40, 577])


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, VllmEngine]]:
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        with shape_engine("qwen-shape", arguments, tmp_path_factory.mktemp("pair")) as started:
            yield request.param, started


def test_windows_are_staged_and_the_cache_is_sound(
    engine: tuple[str, VllmEngine], record_property: Callable[[str, object], None]
) -> None:
    name, started = engine
    status = started.status()
    assert (status.attention_backend, status.staging_unavailable) == ("FlashInferImpl", None)
    check_kv_gate(
        started, PROMPTS, record_property, name=name, before_check=check_every_draft_staged
    )


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
