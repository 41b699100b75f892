"""A commit that also runs vLLM's update of its requests: one launch in place of two.

After each step vLLM's V2 runner launches `_post_update_kernel`, one program a request, which takes
the same counts as the commit. Here its own function is called by further programs of the commit's
launch: nothing of it is copied, so the two cannot differ.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from nwor_kernels.commit.kernel import commit_kernel

UPDATE_ARGUMENTS = (
    "idx_mapping_ptr",
    "num_computed_tokens_ptr",
    "last_sampled_tokens_ptr",
    "output_bin_counts_ptr",
    "output_bin_counts_stride",
    "sampled_tokens_ptr",
    "sampled_tokens_stride",
    "num_sampled_ptr",
    "num_rejected_ptr",
    "query_start_loc_ptr",
    "all_token_ids_ptr",
    "all_token_ids_stride",
    "total_len_ptr",
)
"""Arguments of the update that can be called here; program (n, 0, 0) of it updates request n."""

DRAFT_ARGUMENTS = ("draft_tokens_ptr", "draft_tokens_out_ptr", "num_draft_tokens")
"""What vLLM 0.33 adds: drafts from a pipeline's last stage, which no other update has."""

Update = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Launches for `idx_mapping`, `sampled_tokens`, `num_sampled`, `num_rejected` and
`query_start_loc` of one step."""


class RequestStates(NamedTuple):
    """What the update changes; every tensor stays in place while the engine lives."""

    num_computed_tokens: Tensor
    """[most requests] int32"""
    last_sampled_tokens: Tensor
    """[most requests, 1] int64"""
    output_bin_counts: Tensor | None
    """[most requests, vocabulary] int32, for penalties; None: not counted."""
    all_token_ids: Tensor
    """[most requests, most tokens] int32"""
    total_len: Tensor
    """[most requests] int32"""
    sampled_tokens_stride: int
    """Stride of a step's `sampled_tokens`, from one request to the next."""

    def as_arguments(self) -> tuple[Any, ...]:
        """In the kernel's order, with strides."""
        bins, tokens = self.output_bin_counts, self.all_token_ids
        return (
            self.num_computed_tokens,
            self.last_sampled_tokens,
            bins,
            0 if bins is None else bins.stride(0),
            self.sampled_tokens_stride,
            tokens,
            tokens.stride(0),
            self.total_len,
        )


_NOT_SPECIALIZED: Any = {
    "do_not_specialize": [
        "num_rows",
        "capacity",
        "output_bin_counts_stride",
        "sampled_tokens_stride",
        "all_token_ids_stride",
        "num_requests",
    ],
    "do_not_specialize_on_alignment": [
        "sources",
        "caches",
        "slots",
        "slot_rows",
        "errors",
        "written",
        "num_computed_tokens",
        "last_sampled_tokens",
        "output_bin_counts",
        "all_token_ids",
        "total_len",
        "idx_mapping",
        "sampled_tokens",
        "num_sampled",
        "num_rejected",
        "query_start_loc",
    ],
}


_update: Any = None
"""The function that is called; `commit_and_update_with` puts another in its place."""


def commit_and_update(
    sources,
    caches,
    slots,
    slot_rows,
    errors,
    written,
    num_rows,
    capacity,
    num_computed_tokens,
    last_sampled_tokens,
    output_bin_counts,
    output_bin_counts_stride,
    sampled_tokens_stride,
    all_token_ids,
    all_token_ids_stride,
    total_len,
    idx_mapping,
    sampled_tokens,
    num_sampled,
    num_rejected,
    query_start_loc,
    num_requests,
    STRIDES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    CACHE_STRIDES: tl.constexpr,
    SOURCE_ELEMENT: tl.constexpr,
    CACHE_ELEMENT: tl.constexpr,
    SOURCE_ALIGNMENT: tl.constexpr,
    CACHE_ALIGNMENT: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    CERTAIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_LAYERS: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):
    if tl.program_id(2) < NUM_LAYERS:
        commit_kernel(
            sources,
            caches,
            slots,
            slot_rows,
            num_sampled,
            None,
            None,
            None,
            errors,
            None,
            written,
            num_rows,
            capacity,
            num_requests,
            STRIDES,
            KEY_STRIDES,
            VALUE_STRIDES,
            CACHE_STRIDES,
            SOURCE_ELEMENT,
            CACHE_ELEMENT,
            SOURCE_ALIGNMENT,
            CACHE_ALIGNMENT,
            K_SCALES,
            V_SCALES,
            TOKENS_PER_REQUEST,
            CERTAIN,
            BLOCK_SIZE,
            HEADS,
            KEY_DIM,
            VALUE_DIM,
            NUM_LAYERS,
            SLOT_GROUPS,
            TOKENS,
            COLUMNS,
            CHUNK,
            STARTS_EARLY,
        )
        return
    if (tl.program_id(1) != 0) | (tl.program_id(0) >= num_requests):
        return
    if STARTS_EARLY:
        gdc_wait()
    _update(
        idx_mapping,
        num_computed_tokens,
        last_sampled_tokens,
        output_bin_counts,
        output_bin_counts_stride,
        sampled_tokens,
        sampled_tokens_stride,
        num_sampled,
        num_rejected,
        query_start_loc,
        all_token_ids,
        all_token_ids_stride,
        total_len,
    )


def update_without_drafts(
    idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts,
    output_bin_counts_stride, sampled_tokens, sampled_tokens_stride, num_sampled, num_rejected,
    query_start_loc, all_token_ids, all_token_ids_stride, total_len,
):  # fmt: skip
    _update(
        idx_mapping, num_computed_tokens, last_sampled_tokens, output_bin_counts,
        output_bin_counts_stride, sampled_tokens, sampled_tokens_stride, num_sampled, num_rejected,
        query_start_loc, all_token_ids, all_token_ids_stride, total_len, None, None, 0,
    )  # fmt: skip


@cache
def commit_and_update_with(update: Any) -> Any:
    """The kernel that commits and calls `update`, a `triton.jit` function of UPDATE_ARGUMENTS,
    perhaps with DRAFT_ARGUMENTS behind them."""
    if tuple(update.arg_names) == UPDATE_ARGUMENTS + DRAFT_ARGUMENTS:
        update = triton.jit(_calling(update_without_drafts, update))
    return triton.jit(**_NOT_SPECIALIZED)(_calling(commit_and_update, update))


def _calling(plain: Any, update: Any) -> FunctionType:
    """A function whose `_update` is this one: Triton finds what a kernel calls among the globals
    of its own."""
    function = FunctionType(
        plain.__code__, {**plain.__globals__, "_update": update}, plain.__name__
    )
    function.__annotations__, function.__module__ = plain.__annotations__, plain.__module__
    return function
