"""Verification attention against FlashAttention 3, called as vLLM does under full CUDA graphs.

Beside them the other ways in which the plugin can attend a window, and FlashInfer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nwor_bench.microbench import peers
from nwor_bench.microbench.cases import OURS, PEER, Group, Shape, bytes_moved
from nwor_bench.microbench.inputs import count_sets
from nwor_bench.microbench.rows import Call, Implementation, Implementations, with_peers
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.verify_attention.kernel import VerifyWorkspace, verify_attention_triton
from nwor_kernels.verify_attention.reference import verify_attention_varlen_reference
from nwor_kernels.verify_attention.tuning import Tiling, Tuning, tilings, tuning_of
from nwor_kernels.window_merge.kernel import merge_window_triton

SCALE = 0.02
"""Scale of queries, K and V with an fp8 cache."""

MAX_SEQ_LEN = 16_384
"""Smallest maximum length that graphs are captured for; the timed lengths are shorter."""

MAX_SPLITS = 32
"""vLLM's flash_attn_max_num_splits_for_cuda_graph."""

TOLERANCE = {"bf16": 1e-2, "fp8": 6e-2}
"""Largest relative error allowed. With an fp8 cache FlashAttention rounds its weights to e4m3."""


def attention_implementations(
    group: Group, shape: Shape, device: torch.device, seed: int
) -> Implementations:
    """Our kernel reads the window's K/V from the activations, FlashAttention from the cache.

    `merge` does both: FlashAttention over the committed tokens, and a kernel of ours.
    """
    torch.manual_seed(seed)
    moved = bytes_moved(group, shape)
    sets = [AttentionBuffers(group, shape, device) for _ in range(count_sets(moved, most=16))]
    wanted = sets[0].expected()

    first, *more = tilings(sets[0].rows, shape.heads // shape.kv_heads, shape.head_dim)
    ours = partial(_ours, group, shape, sets, wanted)

    def of_calls(name: str, bind: "Callable[[AttentionBuffers], Call]") -> Implementation:
        calls = [bind(each) for each in sets]
        return Implementation(name, 1, moved, calls, lambda: sets[0].wrong(calls[0], wanted))

    def merge() -> Implementation:
        calls = [each.merge_call() for each in sets]
        # FlashAttention multiplies rows that it does not see by 0.
        check = partial(_check_without_window, sets[0], calls[0], wanted, 100.0)
        return Implementation("merge", 2, moved, calls, check)

    flash = PEER["verify_attention"]
    others: dict[str, Callable[[], Implementation]] = {
        **{str(tiling): partial(ours, tiling) for tiling in more},
        "merge": merge,
        flash: partial(of_calls, flash, AttentionBuffers.flash_call),
        "flashinfer": partial(of_calls, "flashinfer", AttentionBuffers.flashinfer_call),
    }
    return with_peers(ours(first), others)


def _check_without_window(
    buffers: "AttentionBuffers", call: Call, wanted: Tensor, value: float
) -> str:
    """The fault in a call that must not read the window, now all `value`, from the cache."""
    buffers.spoil_window(value)
    wrong = buffers.wrong(call, wanted)
    buffers.write_window()
    return wrong


def _ours(
    group: Group, shape: Shape, sets: "list[AttentionBuffers]", wanted: Tensor, tiling: Tiling
) -> Implementation:
    device = sets[0].query.device
    tuning = tuning_of(tiling, 1 if sets[0].fp8 else 2, device, shape.head_dim)
    workspace = VerifyWorkspace.create(
        max_requests=group.window.requests,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_query_len=group.window.drafts + 1,
        device=device,
    )
    calls = [each.our_call(workspace, tuning) for each in sets]
    check = partial(_check_without_window, sets[0], calls[0], wanted, float("nan"))
    name = OURS if tiling is Tiling.USUAL else str(tiling)
    return Implementation(name, 1, bytes_moved(group, shape), calls, check)


class AttentionBuffers:
    """Inputs and output of one attention step. The cache holds every token, the window included."""

    def __init__(self, group: Group, shape: Shape, device: torch.device):
        self.shape, self.fp8 = shape, group.cache_dtype == "fp8"
        self.requests, self.rows = group.window.requests, group.window.drafts + 1
        self.context = group.context or 0
        length = self.context + self.rows
        self.max_seq_len = max(MAX_SEQ_LEN, length)
        blocks_each = -(-length // shape.block_size)
        blocks, dim = self.requests * blocks_each, shape.head_dim
        self.scale = torch.full((1,), SCALE, device=device)
        cache = torch.randn(
            blocks, shape.kv_heads, shape.block_size, 2 * dim, device=device, dtype=torch.bfloat16
        )
        self.cache = (cache / self.scale).to(torch.float8_e4m3fn) if self.fp8 else cache
        fused = torch.randn(
            self.requests * self.rows, shape.heads + 2 * shape.kv_heads, dim,
            device=device, dtype=torch.bfloat16,
        )  # fmt: skip
        parts = [shape.heads, shape.kv_heads, shape.kv_heads]
        query, self.key, self.value = torch.split(fused, parts, dim=1)
        self.given_query = query
        self.query = quantize_e4m3(query, self.scale) if self.fp8 else query
        self.table = torch.randperm(blocks, device=device).int().view(self.requests, -1)
        self.starts = torch.arange(self.requests + 1, device=device, dtype=torch.int32) * self.rows
        self.seq_lens = torch.full((self.requests,), length, device=device, dtype=torch.int32)
        self.output = torch.empty(query.shape, device=device, dtype=torch.bfloat16)
        self.write_window()

    def our_call(self, workspace: VerifyWorkspace, tuning: Tuning | None = None) -> Call:
        """One launch of our kernel."""
        keywords = {
            "max_query_len": self.rows,
            "max_seq_len": self.max_seq_len,
            "workspace": workspace,
            "tuning": tuning,
        }
        return self._bind(verify_attention_triton, self.output, **keywords)

    def merge_call(self) -> Call:
        """FlashAttention 3 over the committed tokens without a mask, then our merge."""
        context = self.seq_lens - self.rows
        attend, starts = self.flash_call(context, causal=False), self.starts
        scale = self.scale if self.fp8 else None

        def call() -> None:
            _, sums = attend()
            merge_window_triton(
                self.query, self.key, self.value, starts, self.seq_lens, starts[:-1], starts[1:],
                self.output, sums, scale=self.shape.head_dim**-0.5, max_query_len=self.rows,
                cache_dtype=self.cache.dtype, q_scale=scale, k_scale=scale, v_scale=scale,
            )  # fmt: skip

        return call

    def flashinfer_call(self) -> Call:
        """One call of FlashInfer's paged prefill, planned beforehand."""
        shape = self.shape
        return peers.bind_flashinfer(
            self.given_query, self.cache, self.starts, self.table, self.seq_lens, self.output,
            kv_heads=shape.kv_heads, scale=SCALE if self.fp8 else None,
        )  # fmt: skip

    def flash_call(self, lengths: Tensor | None = None, causal: bool = True) -> Callable[..., Any]:
        """One call of FlashAttention 3; its scheduler metadata is made beforehand.

        Args:
            lengths: [requests] int32, tokens of the cache that are seen; None: all.
            causal: without a mask it returns its log-sum-exp too.
        """
        lengths = self.seq_lens if lengths is None else lengths
        attend, schedule = peers.flash_attention()
        shape = self.shape
        common: dict[str, Any] = {
            "max_seqlen_q": self.rows,
            "max_seqlen_k": self.max_seq_len,
            "cu_seqlens_q": self.starts,
            "causal": causal,
            "num_splits": MAX_SPLITS,
        }
        metadata: Tensor = schedule(
            **common,
            batch_size=self.requests,
            num_heads_q=shape.heads,
            num_heads_kv=shape.kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=lengths,
            qkv_dtype=self.query.dtype,
            page_size=shape.block_size,
            window_size=(-1, -1),
        )
        key, value = self.cache.transpose(1, 2).chunk(2, dim=-1)
        scale = self.scale.expand(self.requests, shape.kv_heads) if self.fp8 else None
        return lambda: attend(
            q=self.query,
            k=key,
            v=value,
            out=self.output,
            seqused_k=lengths,
            return_softmax_lse=not causal,
            softmax_scale=shape.head_dim**-0.5,
            block_table=self.table,
            scheduler_metadata=metadata,
            q_descale=scale,
            k_descale=scale,
            v_descale=scale,
            fa_version=3,
            **common,
        )

    def expected(self) -> Tensor:
        """The result in float32, by the kernel's torch reference."""
        output = torch.empty_like(self.output, dtype=torch.float32)
        self._bind(verify_attention_varlen_reference, output)()
        return output

    def wrong(self, call: Call, wanted: Tensor) -> str:
        """The fault in a call's output, or an empty string."""
        self.output.fill_(float("nan"))
        call()
        error = float((self.output.float() - wanted).norm() / wanted.norm())
        allowed = TOLERANCE["fp8" if self.fp8 else "bf16"]
        return "" if error < allowed else f"relative error {error:.1e}, more than {allowed:g}"

    def write_window(self) -> None:
        """Write the window's K/V into the cache, as a stock write does."""
        rows = torch.cat([self.key, self.value], dim=-1)
        self._fill(quantize_e4m3(rows, self.scale) if self.fp8 else rows)

    def spoil_window(self, value: float) -> None:
        """Write this value in place of the window's K/V, which must not be read from the cache."""
        sizes = (self.query.shape[0], self.shape.kv_heads, 2 * self.shape.head_dim)
        self._fill(torch.full(sizes, value, device=self.query.device).to(self.cache.dtype))

    def _fill(self, rows: Tensor) -> None:
        position = self.context + torch.arange(self.rows, device=rows.device)
        block = self.table[:, position // self.shape.block_size].flatten().long()
        offset = (position % self.shape.block_size).repeat(self.requests)
        self.cache.transpose(1, 2).view(torch.uint8)[block, offset] = rows.view(torch.uint8)

    def _bind(self, attend: Callable[..., None], output: Tensor, **more: Any) -> Call:
        """`attend` bound to the arguments that our kernel and its reference share."""
        starts, scale = self.starts, self.scale if self.fp8 else None
        return partial(
            attend, self.query, self.key, self.value, self.cache, starts, self.seq_lens, self.table,
            starts[:-1], starts[1:], output, scale=self.shape.head_dim**-0.5,
            q_scale=scale, k_scale=scale, v_scale=scale, **more,
        )  # fmt: skip
