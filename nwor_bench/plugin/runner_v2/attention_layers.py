"""Which attention layers stage on a GPU, and what is to be known of one.

FlashInfer's cache has the same form as other backends', and its write is a call of its own. The
package may be missing, so it is not imported here. Its metadata hold plans of kernels instead of
one row for each request (`refusals.of_step`). It quantises queries inside its attention, to another
type for decodes than for prefills on a Hopper GPU.
"""

from typing import Any

import torch
from torch import Tensor

from nwor_bench.models.support.facts import FP8_CACHES
from nwor_bench.plugin import refusals
from nwor_bench.plugin.layers import causal_implementation
from nwor_bench.plugin.runner_v2.attention_choice import AttentionShape
from nwor_bench.plugin.runner_v2.committed import can_merge
from nwor_kernels.attention_step import ScoreRules
from nwor_kernels.verify_attention.tuning import unsupported_reason


def query_as_flashinfer(impl: Any, layer: Any, query: Tensor, metadata: Any) -> Tensor:
    """The step's queries in the type in which stock attention would use those of windows.

    vLLM serves windows as decodes if a kernel of FlashInfer takes several queries a request
    (XQA, trtllm-gen), else as prefills. Then no decode has more than one query.

    Args:
        query: [num_tokens, heads, head_dim].
    """
    windows_decode = metadata.num_decode_tokens > metadata.num_decodes
    dtype = metadata.q_data_type_decode if windows_decode else metadata.q_data_type_prefill
    quantised: Tensor = impl.maybe_quant_query(query, dtype, layer._q_scale)
    return quantised


def why_no_kernel(layer: Any, max_query_len: int, dtype: torch.dtype) -> str | None:
    """The fallback reason of a layer whose sizes or dtypes our kernel does not take, or None."""
    impl = causal_implementation(layer.impl)
    cache_dtype = element_of_cache(impl, dtype)
    return unsupported_reason(impl.head_size, max_query_len, dtype, cache_dtype, layer.head_size_v)


def element_of_cache(impl: Any, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a cache of activations of `dtype`, of those that staging reads."""
    return torch.float8_e4m3fn if impl.kv_cache_dtype in FP8_CACHES else dtype


def merges(layer: Any) -> bool:
    """True if stock's output over the committed tokens can be merged in this layer."""
    return can_merge(layer.impl) and refusals.chunk_of(layer) <= 0


def shape_of(layer: Any, dtype: torch.dtype) -> AttentionShape:
    """What layers that attend alike have in common."""
    impl = causal_implementation(layer.impl)
    rules = rules_of(layer, torch.device("cpu"))
    return AttentionShape(
        implementation=type(impl).__name__,
        heads=impl.num_heads,
        kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        value_dim=layer.head_size_v,
        dtype=str(dtype).removeprefix("torch."),
        cache_dtype=impl.kv_cache_dtype,
        block_size=layer.kv_cache.shape[2],
        sliding_window=rules.sliding_window,
        plain=not (rules.softcap or rules.chunk > 0 or rules.sinks is not None),
    )


def rules_of(layer: Any, device: torch.device) -> ScoreRules:
    """How a layer weighs tokens."""
    impl = causal_implementation(layer.impl)
    sinks = getattr(impl, "sinks", None)
    return ScoreRules(
        scale=float(impl.scale),
        softcap=float(impl.logits_soft_cap or 0.0),
        sliding_window=positions_seen(impl.sliding_window),
        chunk=refusals.chunk_of(layer),
        sinks=None if sinks is None else sinks.to(device),
    )


def positions_seen(sliding_window: tuple[int, int] | None) -> int:
    """FlashAttention's (left, right) window as the number of positions seen; -1: all."""
    if sliding_window is None or sliding_window[0] < 0:
        return -1
    return sliding_window[0] + 1
