"""Attention that has to be asked for on a Hopper GPU: staged, and the cache as mode off leaves it.

FlashInfer serves windows as prefills, with fp8 queries over an fp8 cache, or through XQA as decodes
with bf16 queries. Only XQA has full CUDA graphs of windows. vLLM asks the internet whether it may
use XQA; VLLM_HAS_FLASHINFER_CUBIN is the answer if there is none. FlashInfer compiles its kernels
as they are first used, so there are only as few variants here as show both ways.

The composite attention is Gemma 4's: a small Gemma 3 has its layers, with and without a sliding
window, and a head dim that it takes. Without images its causal part serves every step.
"""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_tools import EAGER, FULL_FOR_ALL, PIECEWISE, check_every_draft_staged, prompts_of
from shape_tools import check_kv_gate, shape_engine

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

PREFILL = {"attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": False}}
XQA = {"attention_config": {"backend": "FLASHINFER", "use_trtllm_attention": True}}
COMPOSITE = {"attention_config": {"backend": "TRITON_FLASH_ATTN"}}

KINDS: dict[str, dict[str, Any]] = {
    "prefill-eager-bf16": {**PREFILL, **EAGER, "kv_cache_dtype": "auto"},
    "prefill-piecewise-fp8": {**PREFILL, **PIECEWISE, "kv_cache_dtype": "fp8"},
    "xqa-full-bf16": {**XQA, **FULL_FOR_ALL, "kv_cache_dtype": "auto"},
    "xqa-full-fp8": {**XQA, **FULL_FOR_ALL, "kv_cache_dtype": "fp8"},
    "composite-eager": {**COMPOSITE, **EAGER},
    "composite-piecewise": {**COMPOSITE, **PIECEWISE},
}
"""vLLM's arguments."""

PROMPTS = prompts_of([130, 21, 690, 33, 61, 150, 40, 577])


def prepare_flashinfer() -> None:
    """Skip if it is not here; forget what vLLM has asked about it."""
    pytest.importorskip("flashinfer")
    if shutil.which("nvcc") is None or shutil.which("ninja") is None:
        pytest.skip("FlashInfer compiles its kernels with nvcc and ninja, which are not here")
    from vllm.utils import flashinfer

    for cached in (flashinfer.has_nvidia_artifactory, flashinfer.supports_trtllm_attention):
        cached.cache_clear()


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, VllmEngine]]:
    composite = request.param.startswith("composite")
    pair = "gemma-shape" if composite else "qwen-shape"
    with pytest.MonkeyPatch.context() as patch:
        if not composite:
            prepare_flashinfer()
            patch.setenv("VLLM_HAS_FLASHINFER_CUBIN", "1")
        folder = tmp_path_factory.mktemp("pair")
        with shape_engine(pair, KINDS[request.param], folder) as started:
            yield request.param, started


def test_windows_are_staged_and_the_cache_is_sound(
    engine: tuple[str, VllmEngine], record_property: Callable[[str, object], None]
) -> None:
    name, started = engine
    status = started.status()
    expected = "CompositeAttentionImpl" if name.startswith("composite") else "FlashInferImpl"
    assert (status.attention_backend, status.staging_unavailable) == (expected, None)
    check_kv_gate(
        started, PROMPTS, record_property, name=name, before_check=check_every_draft_staged
    )


def test_full_graphs_of_windows_are_captured_if_vllm_has_them(
    engine: tuple[str, VllmEngine],
) -> None:
    """Behind the test above: mode stage has captured its own."""
    name, started = engine
    facts = started._rpc("nwor_status")["cuda_graphs"]
    assert facts["stage_unavailable"] is None
    assert facts["stage_window_sizes"] == facts["stock_window_sizes"]
    if not name.startswith("xqa"):
        assert facts["stock_window_sizes"] == []
