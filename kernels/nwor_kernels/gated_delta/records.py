"""What a verified window keeps until its accepted tokens are known, and the optional gated norm."""

from typing import NamedTuple

import torch
from torch import Tensor


class WindowRecords(NamedTuple):
    """The updates of tokens: 20.6 KB a token and layer in Qwen3-Next, a state has 1 MiB.

    `verify_window` writes one layer's records (`layer`), `commit_states` reads those of all layers.
    Row i of the batch has row i of the records (or its ring, `Rings`); only the rows' own tokens
    are written.
    """

    u: Tensor
    """[layers, requests, B, HV, V] float32: the update divided by the norm of its key."""

    k: Tensor
    """[layers, requests, B, H, K]: the keys as the convolution returns them, not normalised."""

    g: Tensor
    """[layers, requests, B, HV] float32: the logarithm of the decay."""

    def layer(self, index: int) -> "WindowRecords":
        """The records of one layer: views without the first axis."""
        return WindowRecords(self.u[index], self.k[index], self.g[index])


class Rings(NamedTuple):
    """Records as rings, which outlive their window: a state is written when its ring is full.

    The first n of a ring's B rows are live: tokens that are accepted, but not in the state. A
    window's records follow them, and accepting m of its tokens is n += m. The verify reads n in
    `before`, the commit in `now`, so no kernel reads what another program of it writes, and a step
    that dies or is captured changes no ring. Ring 0 is nobody's. A request keeps one state slot as
    long as it has a ring: columns of `state_indices` must be equal.
    """

    of_row: Tensor
    """[>= requests] int32, the ring of each row of the batch; 0: none, and outputs are 0."""
    before: Tensor
    """[rings] int32, live rows; the commit writes them."""
    now: Tensor
    """[rings] int32, live rows as the verify of the window in flight found them."""
    window: int
    """T, most tokens of a window: with less room a ring is full."""


class WindowInputs(NamedTuple):
    """What one layer's window reads, behind the convolution."""

    mixed: Tensor
    """[tokens, 2 H K + HV V], q, k and v; its rows may be strided."""
    a: Tensor
    """[tokens, HV], the input of the decay; its rows may be strided."""
    b: Tensor
    """[tokens, HV], the input of beta, likewise."""
    A_log: Tensor
    """[HV] float32."""
    dt_bias: Tensor
    """[HV]"""
    state: Tensor
    """[slots, HV, V, K], any strides. vLLM's CPU kernels keep the last two axes the other way
    round: pass `cache.view(slots, HV, K, V).transpose(-1, -2)`."""
    state_indices: Tensor
    """[requests, >= T] int32, the slot of the state after each token."""
    accepted: Tensor
    """[requests] int32, tokens that the window before left: the state is read from column
    accepted - 1."""
    query_start_loc: Tensor
    """[requests + 1] int32, each row's first token; at most T tokens a row."""


def allocate_records(
    rows: tuple[int, int, int],
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> WindowRecords:
    """Records for all layers at fixed addresses.

    Args:
        rows: gated delta nets of the model, requests of the largest batch (or rings), and tokens
            of the longest window (k drafts and one more; or B).
        key_heads, value_heads, key_dim, value_dim: H, HV, K and V, of this rank.
        dtype: of the convolution's output.
        device: of the states.
    """
    return WindowRecords(
        torch.zeros(*rows, value_heads, value_dim, dtype=torch.float32, device=device),
        torch.zeros(*rows, key_heads, key_dim, dtype=dtype, device=device),
        torch.zeros(*rows, value_heads, dtype=torch.float32, device=device),
    )


class GatedNorm(NamedTuple):
    """The RMS norm and the output gate that Qwen3.5's kernel applies to its outputs."""

    gate: Tensor
    """[tokens, HV, V], the last two axes contiguous."""

    weight: Tensor
    """[V]."""

    eps: float

    activation: str = "silu"
    """Activation of the gate: `silu` or `sigmoid`."""
