"""Table of contenders: our kernels, vLLM's and its attention backends, as bound calls.

Only this module of the microbenchmarks imports vLLM. What is missing raises, and is refused.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.run.microbench.bench import Contender
from nwor_bench.run.microbench.cases import ONE_ROW, OURS, InputGroup, Shape
from nwor_bench.run.microbench.inputs import MERGE, STAGED, Attention, Call, Commit, NetWindow
from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.gated_delta.launch import StateCommit, verify_window_triton
from nwor_kernels.gated_delta.records import WindowInputs
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.tuning import padded
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


@lru_cache(maxsize=2)  # all calls of a case share one, as layers do
def _workspace(requests: int, shape: Shape, rows: int, device: torch.device) -> VerifyWorkspace:
    return VerifyWorkspace.create(
        max_requests=requests, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_query_len=rows, device=device,
    )  # fmt: skip


def _merge(step: Attention) -> Call:
    """FlashAttention 3 over the committed tokens without a mask, then our merge of the window."""
    attend, given = _flash_attention(step, 3, step.seq_lens - step.rows, causal=False), step.step
    return lambda: merge_window_triton(given, attend()[1])


def _flash_attention(
    step: Attention, version: int = 3, lengths: Tensor | None = None, *, causal: bool = True
) -> Callable[[], Any]:
    """FlashAttention as vLLM calls it under full graphs, version 3 scheduled beforehand.

    `lengths`: [requests] int32, tokens of the cache that are seen; None: all. Without a mask it
    returns its log-sum-exp too.
    """
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    shape, given = step.shape, _paged(step) | {"causal": causal, "num_splits": 0}
    given |= {} if lengths is None else {"seqused_k": lengths}
    if version == 3:
        given["num_splits"] = MAX_SPLITS
        names = ("max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "causal", "num_splits")
        given["scheduler_metadata"] = interface.get_scheduler_metadata(
            **{name: given[name] for name in names}, cache_seqlens=given["seqused_k"],
            batch_size=step.requests, num_heads_q=shape.heads, num_heads_kv=shape.kv_heads,
            headdim=shape.head_dim, qkv_dtype=step.query.dtype, page_size=shape.block_size,
            window_size=(-1, -1),
        )  # fmt: skip
    attend = interface.flash_attn_varlen_func
    return partial(attend, **given, fa_version=version, return_softmax_lse=not causal)


def _paged(step: Attention) -> dict[str, Any]:
    """What vLLM gives FlashAttention and its Triton kernel alike."""
    key, value = step.cache.transpose(1, 2).chunk(2, dim=-1)
    scale = None if step.scale is None else step.scale.expand(step.requests, step.shape.kv_heads)
    return {
        "q": step.query, "k": key, "v": value, "out": step.output, "block_table": step.table,
        "cu_seqlens_q": step.starts, "max_seqlen_q": step.rows, "seqused_k": step.seq_lens,
        "max_seqlen_k": step.max_seq_len, "softmax_scale": step.shape.head_dim**-0.5,
        "q_descale": scale, "k_descale": scale, "v_descale": scale, "causal": True,
    }  # fmt: skip


def _triton(step: Attention) -> Call:
    """vLLM's Triton backend, with the scratch memory of its metadata builder."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    shape, segments = step.shape, triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    sizes = (len(step.query), shape.heads, segments)
    widths = {"output": [padded(shape.head_dim)], "max": [], "expsum": []}
    scratch = {f"softmax_segm_{name}": _scratch(name, step.query.device, *sizes, *width)
               for name, width in widths.items()}  # fmt: skip
    return partial(
        unified_attention, **_paged(step), **scratch, window_size=(-1, -1), softcap=0.0,
        seq_threshold_3D=triton_attn.MIN_LAUNCH_GRID_SIZE_2D // shape.kv_heads,
        num_par_softmax_segments=segments,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if step.fp8 else KVQuantMode.NONE,
    )  # fmt: skip


@lru_cache(maxsize=6)
def _scratch(name: str, device: torch.device, *sizes: int) -> Tensor:
    """float32 at 0 that all calls of a case share, as layers do."""
    return torch.zeros(sizes, device=device)


def _flashinfer(step: Attention) -> Call:
    """FlashInfer's decode, of several rows its prefill, planned beforehand; not XQA, trtllm-gen."""
    import flashinfer

    if step.fp8:
        raise ValueError("FlashInfer is timed with bf16 caches only")
    query, shape, rows = step.query, step.shape, step.rows
    pages = -(-int(step.seq_lens[0]) // shape.block_size)
    starts = torch.arange(step.requests + 1, dtype=torch.int32, device="cpu")
    last = ((step.seq_lens - 1) % shape.block_size + 1).cpu()
    planned = (starts * pages, step.table[:, :pages].flatten(), last,
               shape.heads, shape.kv_heads, shape.head_dim, shape.block_size)  # fmt: skip
    dtypes = {"q_data_type": query.dtype, "kv_data_type": query.dtype}
    memory = _scratch("flashinfer", query.device, 394 << 18).view(torch.uint8)  # vLLM's size
    if rows == 1:
        run = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory, "HND", use_tensor_cores=True)
        run.plan(*planned, **dtypes)
    else:
        run = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "HND")
        run.plan(starts * rows, *planned, causal=True, **dtypes)
    return partial(run.run, query, step.cache.chunk(2, dim=-1), out=step.output)


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
    "attention": (
        Attention,
        {
            STAGED: _verify,
            MERGE: _merge,
            "flash_attention_3": _flash_attention,
            "flash_attention_2": partial(_flash_attention, version=2),
            "flashinfer": _flashinfer,
            "triton": _triton,
        },
    ),
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

    def contender(
        name: str, bind: Callable[[Any], Call], steps: list[Any] = sets, one: Any = None
    ) -> Contender:
        moved, check = steps[0].bytes_moved(name), partial(steps[0].check, name=name)
        shown = name if steps is sets else f"{name}{ONE_ROW}"
        return Contender(shown, moved, lambda: list(map(bind, steps)), check, one)

    if group.kernel != "attention":
        return [contender(*row) for row in rows.items()]
    ones = [step.one_row() for step in sets]
    return [contender(*row, one=contender(*row, ones)) for row in rows.items()]
