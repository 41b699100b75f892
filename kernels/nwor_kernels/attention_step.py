"""Arguments of the kernels that attend windows, and of their references: one layer's step."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class StepRequests(NamedTuple):
    """The requests of a step: int32 on the device, contiguous."""

    query_start_loc: Tensor
    """[requests + 1], first query row of each request, non-decreasing."""
    seq_lens: Tensor
    """[requests], tokens of each request, this step's and so the staged ones included."""
    block_table: Tensor
    """[requests, max blocks]; its rows may be strided."""
    staged_start: Tensor
    """[requests]: rows start..end-1 of the staged source are the request's last end - start tokens.
    A request without staged rows is skipped."""
    staged_end: Tensor
    """[requests]"""


class Scales(NamedTuple):
    """Scales of fp8 queries and caches: float32 on the device, [1] or [kv_heads]."""

    query: Tensor | None = None
    """None: queries are not quantised."""
    key: Tensor | None = None
    """Scale of K; in latent layers of the whole row."""
    value: Tensor | None = None


@dataclass(frozen=True)
class ScoreRules:
    """How a layer weighs tokens, besides softmax(q k) v."""

    scale: float
    """Factor on the scores."""
    softcap: float = 0.0
    """If > 0, scores become softcap * tanh(scores / softcap)."""
    sliding_window: int = -1
    """A query sees at most this many positions, its own included; -1: all."""
    chunk: int = -1
    """If > 0, a query at position p sees nothing before p - p % chunk."""
    sinks: Tensor | None = None
    """[heads], contiguous: a logit of each head that takes part in the softmax's denominator and
    has no value; neither scaled nor capped."""


class AttentionStep(NamedTuple):
    """One layer's attention of a step whose newest K/V may be staged.

    The last dimension of every tensor is contiguous.
    """

    query: Tensor
    """[num_tokens, heads, head_dim]; float8_e4m3fn if vLLM quantises queries. Of latent layers the
    absorbed part (multiplied by W_UK), [num_tokens, heads, latent_dim]."""
    key: Tensor
    """[rows, kv_heads, head_dim], the staged source. Of latent layers the latents, [rows,
    latent_dim] or [rows, 1, latent_dim]."""
    value: Tensor
    """[rows, kv_heads, value_dim], staged likewise. Of latent layers the keys' rotary part, [rows,
    pe_dim] or [rows, 1, pe_dim]."""
    kv_cache: Tensor
    """[blocks, kv_heads, block_size, head_dim + value_dim], K then V, or latent rows [blocks,
    block_size, latent_dim + pe_dim]; of the dtype of `key`, or e4m3 (uint8 is taken as e4m3)."""
    requests: StepRequests
    output: Tensor
    """[num_tokens, heads, value_dim], written in place. Of latent layers [num_tokens, heads,
    latent_dim], still to be multiplied by W_UV."""
    scores: ScoreRules
    max_query_len: int
    """Most query rows of a request with staged rows."""
    max_seq_len: int
    """Upper bound of `seq_lens`, the model's own under graph capture; the work is divided by the
    actual lengths."""
    scales: Scales = Scales()
    query_pe: Tensor | None = None
    """Latent layers only: [num_tokens, heads, pe_dim], the rotary part of `query`."""
