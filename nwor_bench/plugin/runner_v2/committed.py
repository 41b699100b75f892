"""Stock's attention over the committed tokens of equal windows, in full CUDA graphs too.

Its lengths are those of what the cache holds. They are computed on the device in every forward,
before the first layer that needs them, so nothing waits for the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import fa_utils

from nwor_bench.plugin.runner_v2.plan import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staged_layer import StepInputs


class CommittedOnly:
    """Metadata with which stock attends the committed tokens; one object for the layers of a group.

    Args:
        shortened: (a step's metadata, lengths [requests] int32) -> metadata with these lengths.
    """

    def __init__(
        self,
        inputs: StepInputs,
        max_requests: int,
        device: torch.device,
        shortened: Callable[[Any, Tensor], Any],
    ):
        self._inputs = inputs
        # One tensor for all steps: captured graphs write and read it at its place.
        self._lengths = torch.empty(max_requests, dtype=torch.int32, device=device)
        self._shortened = shortened
        self._metadata: Any = None
        self._committed_only: Any = None
        self._first_layer = -1

    def metadata(self, number: int, batch: GpuWindowBatch, metadata: Any) -> Any:
        """The step's metadata with the lengths of what is committed, made by its first layer.

        A layer that comes again begins another forward, even with the same metadata: a captured
        forward must hold the launches that shorten the lengths.

        Args:
            number: the layer's number among the target layers.
            batch: the window, of a step of nothing but equal windows.
            metadata: the layer's own.
        """
        if metadata is not self._metadata or number == self._first_layer:
            seq_lens, staged = self._inputs.views.seq_lens, batch.tokens_per_request
            assert staged is not None
            lengths = self._lengths[: seq_lens.shape[0]]
            self._committed_only = self.over(metadata, seq_lens, staged, lengths)
            self._metadata, self._first_layer = metadata, number
        return self._committed_only

    def over(self, metadata: Any, seq_lens: Tensor, staged: int, lengths: Tensor) -> Any:
        """Metadata over all but the last `staged` tokens; `lengths` is overwritten."""
        # Padding of a captured shape has no tokens at all.
        torch.sub(seq_lens, staged, out=lengths).clamp_(min=0)
        return self._shortened(metadata, lengths)


def decode_shortened(metadata: Any, lengths: Tensor) -> Any:
    """Latent layers' metadata with these lengths, causal, with the schedule that stock has made.

    The schedule is of the whole lengths. It says into how many parts a context is cut; what is read
    follows from the lengths, and a part may be empty.
    """
    return replace(metadata, decode=replace(metadata.decode, seq_lens=lengths))


def without_mask(layer: Any) -> Callable[[Any, Tensor], Any]:
    """Metadata without a causal mask. A schedule's form depends on the mask, so it is made anew.

    Args:
        layer: one of those that share the metadata.
    """
    impl = layer.impl

    def shortened(metadata: Any, lengths: Tensor) -> Any:
        schedule = metadata.scheduler_metadata
        if schedule is not None:
            quantised = impl.kv_cache_dtype.startswith("fp8")
            schedule = fa_utils.get_scheduler_metadata(
                batch_size=lengths.shape[0],
                max_seqlen_q=metadata.max_query_len,
                max_seqlen_k=metadata.max_seq_len,
                num_heads_q=impl.num_heads,
                num_heads_kv=impl.num_kv_heads,
                headdim=impl.head_size,
                cache_seqlens=lengths,
                qkv_dtype=torch.float8_e4m3fn if quantised else layer.kv_cache.dtype,
                cu_seqlens_q=metadata.query_start_loc,
                page_size=layer.kv_cache.shape[2],
                causal=False,
                window_size=(-1, -1),
                num_splits=metadata.max_num_splits,
            )
        return replace(metadata, seq_lens=lengths, causal=False, scheduler_metadata=schedule)

    return shortened


def can_merge(impl: Any) -> bool:
    """True for FlashAttention 3 without anything that would have to be in both parts."""
    plain = (
        getattr(impl, "vllm_flash_attn_version", None) == 3
        and tuple(impl.sliding_window or (-1, -1)) == (-1, -1)
        and not impl.logits_soft_cap
        and getattr(impl, "sinks", None) is None
    )
    return plain and type(impl).__name__ == "FlashAttentionImpl"


def attend_committed(
    layer: Any, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor
) -> Tensor:
    """FlashAttention as vLLM's implementation calls it; the log-sum-exp, [heads, rows] float32.

    Args:
        query: [rows, heads, head_dim].
        kv_cache: [blocks, kv_heads, block_size, 2 * head_dim].
        metadata: FlashAttention's, over the committed tokens.
        output: [rows, heads, head_dim], overwritten.
    """
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    impl, rows = layer.impl, metadata.num_actual_tokens
    if impl.kv_cache_dtype.startswith("fp8"):
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    key, value = map(
        canonicalize_singleton_dim_strides,
        kv_cache.transpose(1, 2).tensor_split((impl.head_size,), dim=-1),
    )
    shape = (metadata.query_start_loc.shape[0] - 1, impl.num_kv_heads)
    _, sums = fa_utils.flash_attn_varlen_func(
        q=query[:rows],
        k=key,
        v=value,
        out=output[:rows],
        cu_seqlens_q=metadata.query_start_loc,
        max_seqlen_q=metadata.max_query_len,
        seqused_k=metadata.seq_lens,
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=impl.scale,
        causal=metadata.causal,
        window_size=[-1, -1],
        block_table=metadata.block_table,
        return_softmax_lse=True,
        scheduler_metadata=metadata.scheduler_metadata,
        fa_version=impl.vllm_flash_attn_version,
        q_descale=layer._q_scale.expand(shape) if impl.supports_quant_query_input else None,
        k_descale=layer._k_scale.expand(shape),
        v_descale=layer._v_scale.expand(shape),
        num_splits=metadata.max_num_splits,
    )
    assert isinstance(sums, Tensor)
    return sums
