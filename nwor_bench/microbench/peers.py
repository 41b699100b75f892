"""Peers: vLLM's cache write and gated delta kernels, FlashAttention 3, FlashInfer, as bound calls.

Views are made beforehand, so that only the peer's own kernels are timed. This is the only module of
the microbenchmarks that imports vLLM.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwor_bench.microbench.rows import Call, RefusedError
from nwor_kernels.gated_delta.records import GatedNorm


def bind_stock_write(
    key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, scale: Tensor
) -> Call:
    """`reshape_and_cache_flash` (CUDA), as vLLM's FlashAttention backend calls it, for one layer.

    Args:
        key, value: [tokens, kv_heads, head_dim].
        cache: [blocks, kv_heads, block_size, 2 * head_dim]; uint8 holds fp8.
        slots: [tokens] int64.
        scale: [1] float32, of both K and V; used for fp8 caches.

    Raises RefusedError if vLLM or its CUDA kernels are not installed.
    """
    write, kind = _stock_write(), "fp8" if cache.dtype == torch.uint8 else "auto"
    to = torch.split(cache.transpose(1, 2), key.shape[-1], dim=-1)
    return lambda: write(key, value, *to, slots, kind, scale, scale)


@cache
def _stock_write() -> Callable[..., None]:
    """vLLM's write, without importing vLLM. A CPU build has no such library."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise RefusedError("vLLM is not installed")
    for folder in found.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("_C_stable_libtorch*.so")):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash.default
    except AttributeError as error:
        raise RefusedError("this vLLM was built without CUDA kernels") from error


@cache
def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's `flash_attn_varlen_func` and `get_scheduler_metadata`."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise RefusedError(f"vLLM's FlashAttention does not import: {error}") from error
    return flash_attn_varlen_func, get_scheduler_metadata


FLASHINFER_WORKSPACE = 128 << 20


def bind_flashinfer(
    query: Tensor,
    cache: Tensor,
    starts: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    *,
    kv_heads: int,
    scale: float | None,
) -> Call:
    """FlashInfer's prefill over a paged cache, which serves windows on Hopper; planned beforehand.

    Args:
        query: [tokens, heads, head_dim], not quantised.
        cache: [blocks, kv_heads, block_size, 2 * head_dim].
        starts: [requests + 1] int32, first row of each request.
        table: [requests, blocks of each] int32, all of them in use.
        seq_lens: [requests] int32.
        scale: of K and V of an fp8 cache; None for others.

    Raises RefusedError if FlashInfer is not installed.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise RefusedError(f"FlashInfer does not import: {error}") from error
    heads, head_dim = query.shape[1:]
    block_size, (requests, each) = cache.shape[2], table.shape
    memory = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "HND")
    first_blocks = torch.arange(requests + 1, dtype=torch.int32, device=query.device) * each
    wrapper.plan(
        starts, first_blocks, table.flatten(), (seq_lens - 1) % block_size + 1, heads, kv_heads,
        head_dim, block_size, causal=True, q_data_type=query.dtype, kv_data_type=cache.dtype,
    )  # fmt: skip
    key_and_value = torch.split(cache, head_dim, dim=-1)
    scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
    return lambda: wrapper.run(query, key_and_value, out=output, **scales)


def bind_delta_rule(inputs: Mapping[str, Tensor], out: Tensor, key_heads: int) -> Call:
    """vLLM's Triton kernel for windows of a gated delta net, as `_forward_core` calls it.

    Args:
        inputs: of `verify_window_reference`, by name; `mixed` to `query_start_loc`.
        out: [tokens, HV, V]; vLLM too copies the outputs there.
        key_heads: H.

    Raises RefusedError if vLLM is not installed.
    """
    try:
        from vllm.third_party.flash_linear_attention.ops import (
            fused_sigmoid_gating_delta_rule_update,
        )
    except ImportError as error:
        raise RefusedError(f"vLLM's gated delta kernels do not import: {error}") from error
    own = dict(inputs)
    mixed, state = own.pop("mixed"), own.pop("state")
    _, value_heads, value_dim, key_dim = state.shape
    sizes = [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    q, k, v = torch.split(mixed, sizes, dim=-1)
    q, k = (part.reshape(1, -1, key_heads, key_dim) for part in (q, k))
    v = v.reshape(1, -1, value_heads, value_dim)
    names = {
        "state_indices": "ssm_state_indices",
        "accepted": "num_accepted_tokens",
        "query_start_loc": "cu_seqlens",
    }
    named = {names.get(name, name): tensor for name, tensor in own.items()}

    def run() -> None:
        found, _ = fused_sigmoid_gating_delta_rule_update(
            q=q, k=k, v=v, initial_state=state, use_qk_l2norm_in_kernel=True, **named
        )
        out.copy_(found.squeeze(0))

    return run


def bind_fused_delta_rule(inputs: Mapping[str, Tensor], out: Tensor, norm: GatedNorm) -> Call:
    """vLLM's CUDA kernel for the same, with the gated norm; arguments as for `bind_delta_rule`.

    Raises RefusedError if vLLM has no such kernel, or a window has more than 8 tokens.
    """
    window = inputs["state_indices"].shape[1]
    if window > 8:
        raise RefusedError(f"at most 8 tokens a window, not {window}")
    try:
        from vllm._custom_ops import fused_gdn_decode_post_conv_mtp

        torch.ops._C.fused_gdn_decode_post_conv_mtp  # noqa: B018  (missing in a CPU build)
    except (ImportError, AttributeError) as error:
        raise RefusedError(f"this vLLM has no CUDA kernel for it: {error}") from error
    names = {"accepted": "num_accepted_tokens", "query_start_loc": "cu_seqlens"}
    names["mixed"] = "mixed_qkv"
    named = {names.get(name, name): tensor for name, tensor in inputs.items()}
    return lambda: fused_gdn_decode_post_conv_mtp(
        **named,
        output_gate=norm.gate,
        norm_weight=norm.weight,
        out=out,
        scale=inputs["state"].shape[3] ** -0.5,
        norm_eps=norm.eps,
        output_gate_activation=norm.activation,
    )
