"""Real vLLM on a GPU where values have another width than keys (MiMo V2): all windows staged.

On Hopper the model chooses FlashAttention: version 3, and for layers with sinks version 4. Without
CUTLASS' Python package stock vLLM does not start there, so that case is skipped; it comes last and
in a process of its own. Triton's backend is asked for by name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_tools import GRAPHS, implementations_of, mtp_of, tiny_spec
from test_gpu_groups import SYNTHETIC, check_all
from tiny_architectures import unequal_pair

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

TRITON: dict[str, Any] = {"attention_backend": "TRITON_ATTN_DIFFKV"}
OWN_PROCESS = pytest.mark.own_process
FLASH_IMPL, TRITON_IMPL = "FlashAttentionDiffKVImpl", "TritonAttentionDiffKVImpl"


@pytest.mark.parametrize(
    ("method", "graphs", "sinks", "arguments"),
    [
        pytest.param("ngram", "full", False, {}, id="flash-full"),
        pytest.param("ngram", "full", True, TRITON, id="triton-full"),
        pytest.param("mtp", "full", True, TRITON, id="triton-mtp"),
        pytest.param("ngram", "eager", False, {}, id="flash-eager"),
        pytest.param("ngram", "eager", True, TRITON, id="triton-eager"),
        pytest.param("ngram", "full", True, {}, id="flash-sinks", marks=OWN_PROCESS),
    ],
)
def test_values_of_another_width_are_staged(
    method: str,
    graphs: str,
    sinks: bool,
    arguments: dict[str, Any],
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    if sinks and not arguments:
        pytest.importorskip("cutlass", reason="vLLM attends to sinks with FlashAttention 4")
    pair = unequal_pair(tmp_path / "model", "bfloat16", SYNTHETIC, sinks=sinks)
    engine_args = json.dumps({"enable_prefix_caching": False, **GRAPHS[graphs], **arguments})
    spec = tiny_spec(draft_tokens=4, kv_cache_gib=0.5, engine_args=engine_args)
    engine = start_alone(mtp_of(pair) if method == "mtp" else pair, spec)
    status = engine.status()
    assert status.target_layers == 4, status  # without the drafter's
    expected = {TRITON_IMPL} if arguments else {FLASH_IMPL}
    assert implementations_of(engine) == expected, status
    check_all(engine, "bfloat16", graphs, record_property)
