"""Table of contenders: our kernels, vLLM's, FlashAttention 3 and FlashInfer, as bound calls.

Only this module of the microbenchmarks imports vLLM. What is missing raises, and is refused.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nwor_bench.run.microbench.bench import Contender
from nwor_bench.run.microbench.cases import OURS, InputGroup, Shape
from nwor_bench.run.microbench.inputs import ATTENTION_SCALE, Attention, Call, Commit, NetWindow
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.tuning import Tiling, tuning_of
from nwor_kernels.window_merge.kernel import merge_window_triton

MAX_SPLITS = 32
"""vLLM's flash_attn_max_num_splits_for_cuda_graph."""

COLD_BYTES = 512 << 20
"""Bytes that the calls of a graph should touch together: several times any GPU's L2."""


def _commit(step: Commit) -> Call:
    plan = CommitPlan(step.caches, step.scales, step.scales)
    return partial(
        plan.commit_windows, StagedSources(list(step.keys), list(step.values)),
        CommitRows(step.slots, step.rows), step.counts, step.errors,
    )  # fmt: skip


def _stock_writes(step: Commit) -> Call:
    """vLLM's write of accepted rows, layer by layer, as its FlashAttention backend calls it."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or []:
        for library in Path(folder).glob("_C_stable_libtorch*.so"):  # without importing vLLM
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    write = torch.ops._C_cache_ops.reshape_and_cache_flash.default
    _, keys, values = step.split(step.fused[:, step.accepted])
    slots, kind = step.slots[step.accepted], "fp8" if step.fp8 else "auto"
    caches = [cache.transpose(1, 2).chunk(2, dim=-1) for cache in step.caches]
    return _in_turn(
        partial(write, key, value, *to, slots, kind, step.scale, step.scale)
        for key, value, to in zip(keys, values, caches, strict=True)
    )


def _verify(tiling: Tiling, step: Attention) -> Call:
    shape, device = step.shape, step.cache.device
    tuning = tuning_of(tiling, step.cache.element_size(), device, shape.head_dim)
    workspace = _workspace(step.requests, shape, step.rows, device)
    return partial(verify_attention_triton, step.step, workspace, tuning)


@lru_cache(maxsize=1)  # all calls of a case share one, as layers do
def _workspace(requests: int, shape: Shape, rows: int, device: torch.device) -> VerifyWorkspace:
    return VerifyWorkspace.create(
        max_requests=requests, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_query_len=rows, device=device,
    )  # fmt: skip


def _merge(step: Attention) -> Call:
    """FlashAttention over the committed tokens without a mask, then our merge of the window."""
    attend, given = _flash_attention(step, step.seq_lens - step.rows, causal=False), step.step
    return lambda: merge_window_triton(given, attend()[1])


def _flash_attention(
    step: Attention, lengths: Tensor | None = None, causal: bool = True
) -> Callable[[], Any]:
    """FlashAttention 3 as vLLM calls it under full graphs, scheduled beforehand.

    `lengths`: [requests] int32, tokens of the cache that are seen; None: all. Without a mask it
    returns its log-sum-exp too.
    """
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    shape, lengths = step.shape, step.seq_lens if lengths is None else lengths
    common = {
        "max_seqlen_q": step.rows, "max_seqlen_k": step.max_seq_len, "cu_seqlens_q": step.starts,
        "causal": causal, "num_splits": MAX_SPLITS,
    }  # fmt: skip
    metadata = interface.get_scheduler_metadata(
        **common, batch_size=step.requests, num_heads_q=shape.heads, num_heads_kv=shape.kv_heads,
        headdim=shape.head_dim, cache_seqlens=lengths, qkv_dtype=step.query.dtype,
        page_size=shape.block_size, window_size=(-1, -1),
    )  # fmt: skip
    key, value = step.cache.transpose(1, 2).chunk(2, dim=-1)
    scale = None if step.scale is None else step.scale.expand(step.requests, shape.kv_heads)
    return partial(
        interface.flash_attn_varlen_func, **common, q=step.query, k=key, v=value, out=step.output,
        seqused_k=lengths, return_softmax_lse=not causal, softmax_scale=shape.head_dim**-0.5,
        block_table=step.table, scheduler_metadata=metadata, q_descale=scale, k_descale=scale,
        v_descale=scale, fa_version=3,
    )  # fmt: skip


def _flashinfer(step: Attention) -> Call:
    """FlashInfer's prefill over a paged cache, which serves windows on Hopper; planned beforehand.

    It takes queries that are not quantised.
    """
    import flashinfer

    query, shape = step.given_query, step.shape
    memory = torch.empty(128 << 20, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "HND")
    blocks = step.starts // step.rows * step.table.shape[1]
    wrapper.plan(
        step.starts, blocks, step.table.flatten(), (step.seq_lens - 1) % shape.block_size + 1,
        shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, causal=True,
        q_data_type=query.dtype, kv_data_type=step.cache.dtype,
    )  # fmt: skip
    scales = dict.fromkeys(("k_scale", "v_scale"), ATTENTION_SCALE) if step.fp8 else {}
    return partial(wrapper.run, query, step.cache.chunk(2, dim=-1), out=step.output, **scales)


def _verify_nets(step: NetWindow, **more: Any) -> Call:
    layers = range(step.nets.layers)
    return _in_turn(step.bind(verify_window_triton, layer, **more) for layer in layers)


def _nets(step: NetWindow, **more: Any) -> Call:
    """A verify of each layer that writes no state, and one commit."""
    commit = StateCommit(step.states, [0] * step.nets.layers, [step.table], step.records)
    commits = partial(commit, step.accepted, step.committed)
    return _in_turn([_verify_nets(step, **more), commits])


def _delta_rule(step: NetWindow) -> Call:
    """vLLM's Triton kernel, as `_forward_core` calls it with q, k and v in tensors of their own."""
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    nets = step.nets
    keys, values = (nets.key_heads, nets.key_dim), (nets.value_heads, nets.value_dim)
    sizes = (keys, keys, values)

    def layer(index: int) -> Call:
        own = step.layer(index)
        parts = torch.split(own.pop("mixed"), [heads * dim for heads, dim in sizes], dim=-1)
        q, k, v = (part.reshape(1, -1, *size) for part, size in zip(parts, sizes, strict=True))
        run = partial(
            fused_sigmoid_gating_delta_rule_update, q=q, k=k, v=v, initial_state=own.pop("state"),
            ssm_state_indices=own.pop("state_indices"), num_accepted_tokens=own.pop("accepted"),
            cu_seqlens=own.pop("query_start_loc"), use_qk_l2norm_in_kernel=True, **own,
        )  # fmt: skip
        return lambda: step.out.copy_(run()[0].squeeze(0))  # vLLM copies the outputs too

    return _in_turn(map(layer, range(nets.layers)))


def _fused_delta_rule(step: NetWindow) -> Call:
    """vLLM's CUDA kernel, Qwen3.5's, with the gated norm in it."""
    from vllm._custom_ops import fused_gdn_decode_post_conv_mtp

    if step.window > 8:
        raise ValueError(f"at most 8 tokens a window, not {step.window}")
    norm = step.norm

    def layer(index: int) -> Call:
        own = step.layer(index)
        return partial(
            fused_gdn_decode_post_conv_mtp, mixed_qkv=own.pop("mixed"),
            num_accepted_tokens=own.pop("accepted"), cu_seqlens=own.pop("query_start_loc"), **own,
            output_gate=norm.gate, norm_weight=norm.weight, norm_eps=norm.eps, out=step.out,
            scale=step.nets.key_dim**-0.5, output_gate_activation=norm.activation,
        )  # fmt: skip

    return _in_turn(map(layer, range(step.nets.layers)))


def _in_turn(calls: Iterable[Call]) -> Call:
    every = list(calls)

    def run() -> None:
        for call in every:
            call()

    return run


@dataclass(frozen=True)
class Kernel:
    """A kernel: the class of its inputs, with the reference's check, and what does its work."""

    inputs: Callable[[InputGroup, Shape], Any]
    rows: Mapping[str, Callable[[Any], Call]]
    max_sets: int = 32


KERNELS = {
    "commit": Kernel(Commit, {OURS: _commit, "vllm_cuda": _stock_writes}),
    "verify_attention": Kernel(
        Attention,
        {
            OURS: partial(_verify, Tiling.USUAL),
            Tiling.FOUR_PROGRAMS: partial(_verify, Tiling.FOUR_PROGRAMS),
            Tiling.ROWS_32: partial(_verify, Tiling.ROWS_32),
            "merge": _merge,
            "flash_attention_3": _flash_attention,
            "flashinfer": _flashinfer,
        },
    ),
    "gated_delta": Kernel(
        NetWindow,
        {
            OURS: _nets,
            "control": partial(_verify_nets, write_states=True),
            "vllm_triton": _delta_rule,
            "nwor_norm": lambda step: _nets(step, norm=step.norm),
            "vllm_cuda": _fused_delta_rule,
        },
        max_sets=1,
    ),
}


def contenders(group: InputGroup, shape: Shape) -> list[Contender]:
    """A group's contenders, ours first; inputs are made now, calls when they are bound."""
    kernel = KERNELS[group.kernel]
    first = kernel.inputs(group, shape)
    number = min(kernel.max_sets, max(2, -(-COLD_BYTES // first.bytes_moved(OURS))))
    sets = [first, *(kernel.inputs(group, shape) for _ in range(1, number))]

    def contender(name: str, bind: Callable[[Any], Call]) -> Contender:
        check = partial(first.check, name=name)
        return Contender(name, first.bytes_moved(name), lambda: list(map(bind, sets)), check)

    return [contender(*row) for row in kernel.rows.items() if row[0] not in first.absent]
