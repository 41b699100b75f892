"""Table of contenders: our kernels, vLLM's and FlashAttention 3, as bound calls.

Only this module of the microbenchmarks imports vLLM. What is missing raises, and is refused.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch

from nwor_bench.run.microbench.bench import Contender
from nwor_bench.run.microbench.cases import OURS, InputGroup, Shape
from nwor_bench.run.microbench.inputs import Attention, Call, Commit, NetWindow
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.records import WindowInputs
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton

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
    from vllm._custom_ops import reshape_and_cache_flash as write

    _, keys, values = step.split(step.fused[:, step.accepted])
    slots, kind = step.slots[step.accepted], "fp8" if step.fp8 else "auto"
    caches = [cache.transpose(1, 2).chunk(2, dim=-1) for cache in step.caches]
    return _in_turn(
        partial(write, key, value, *to, slots, kind, step.scale, step.scale)
        for key, value, to in zip(keys, values, caches, strict=True)
    )


def _verify(step: Attention) -> Call:
    workspace = _workspace(step.requests, step.shape, step.rows, step.cache.device)
    return partial(verify_attention_triton, step.step, workspace)


@lru_cache(maxsize=1)  # all calls of a case share one, as layers do
def _workspace(requests: int, shape: Shape, rows: int, device: torch.device) -> VerifyWorkspace:
    return VerifyWorkspace.create(
        max_requests=requests, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_query_len=rows, device=device,
    )  # fmt: skip


def _flash_attention(step: Attention) -> Call:
    """FlashAttention 3 as vLLM calls it under full graphs, scheduled beforehand."""
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    shape = step.shape
    common = {
        "max_seqlen_q": step.rows, "max_seqlen_k": step.max_seq_len, "cu_seqlens_q": step.starts,
        "causal": True, "num_splits": MAX_SPLITS,
    }  # fmt: skip
    metadata = interface.get_scheduler_metadata(
        **common, batch_size=step.requests, num_heads_q=shape.heads, num_heads_kv=shape.kv_heads,
        headdim=shape.head_dim, cache_seqlens=step.seq_lens, qkv_dtype=step.query.dtype,
        page_size=shape.block_size, window_size=(-1, -1),
    )  # fmt: skip
    key, value = step.cache.transpose(1, 2).chunk(2, dim=-1)
    scale = None if step.scale is None else step.scale.expand(step.requests, shape.kv_heads)
    return partial(
        interface.flash_attn_varlen_func, **common, q=step.query, k=key, v=value, out=step.output,
        seqused_k=step.seq_lens, softmax_scale=shape.head_dim**-0.5, block_table=step.table,
        scheduler_metadata=metadata, q_descale=scale, k_descale=scale, v_descale=scale,
        fa_version=3,
    )  # fmt: skip


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
    sizes = 2 * [(nets.key_heads, nets.key_dim)] + [(nets.value_heads, nets.value_dim)]

    def layer(given: WindowInputs) -> Call:
        parts = torch.split(given.mixed, [heads * dim for heads, dim in sizes], dim=-1)
        q, k, v = (part.reshape(1, -1, *size) for part, size in zip(parts, sizes, strict=True))
        run = partial(
            fused_sigmoid_gating_delta_rule_update, q=q, k=k, v=v, a=given.a, b=given.b,
            A_log=given.A_log, dt_bias=given.dt_bias, initial_state=given.state,
            ssm_state_indices=given.state_indices, num_accepted_tokens=given.accepted,
            cu_seqlens=given.query_start_loc, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return lambda: step.out.copy_(run()[0].squeeze(0))  # vLLM copies the outputs too

    return _in_turn(map(layer, step.inputs))


def _fused_delta_rule(step: NetWindow) -> Call:
    """vLLM's CUDA kernel, Qwen3.5's, with the gated norm in it."""
    from vllm._custom_ops import fused_gdn_decode_post_conv_mtp

    if step.window > 8:
        raise ValueError(f"at most 8 tokens a window, not {step.window}")
    norm = step.norm
    return _in_turn(
        partial(
            fused_gdn_decode_post_conv_mtp, own.mixed, own.a, own.b, own.A_log, own.dt_bias,
            own.state_indices, own.query_start_loc, own.accepted, own.state, norm.gate, norm.weight,
            norm_eps=norm.eps, out=step.out, scale=step.nets.key_dim**-0.5,
            output_gate_activation=norm.activation,
        )
        for own in step.inputs
    )  # fmt: skip


def _in_turn(calls: Iterable[Call]) -> Call:
    every = list(calls)

    def run() -> None:
        for call in every:
            call()

    return run


KERNELS: dict[str, tuple[Callable[[InputGroup, Shape], Any], dict[str, Callable[[Any], Call]]]] = {
    "commit": (Commit, {OURS: _commit, "vllm_cuda": _stock_writes}),
    "verify_attention": (Attention, {OURS: _verify, "flash_attention_3": _flash_attention}),
    "gated_delta": (
        NetWindow,
        {
            OURS: _nets,
            "control": partial(_verify_nets, write_states=True),
            "vllm_triton": _delta_rule,
            "nwor_norm": lambda step: _nets(step, norm=step.norm),
            "vllm_cuda": _fused_delta_rule,
        },
    ),
}
"""For each kernel its inputs, with the reference's check, and what does its work, ours first."""


def contenders(group: InputGroup, shape: Shape) -> list[Contender]:
    """A group's contenders, ours first; inputs are made now, calls when they are bound."""
    make, rows = KERNELS[group.kernel]
    first = make(group, shape)
    number = min(first.MAX_SETS, max(2, -(-COLD_BYTES // first.bytes_moved(OURS))))
    sets = [first, *(make(group, shape) for _ in range(1, number))]

    def contender(name: str, bind: Callable[[Any], Call]) -> Contender:
        check = partial(first.check, name=name)
        return Contender(name, first.bytes_moved(name), lambda: list(map(bind, sets)), check)

    return [contender(*row) for row in rows.items()]
