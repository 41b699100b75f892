"""What a verified window keeps until its accepted tokens are known, and the optional gated norm."""

from typing import NamedTuple

import torch
from torch import Tensor


class WindowRecords(NamedTuple):
    """The updates of a window's tokens: 20.6 KB a token and layer in Qwen3-Next, a state has 1 MiB.

    `verify_window` writes one layer's records (`layer`), `commit_states` reads those of all layers.
    Row i of the batch has row i of the records; only the rows' own tokens are written.
    """

    u: Tensor
    """[layers, requests, T, HV, V] float32: the update divided by the norm of its key."""

    k: Tensor
    """[layers, requests, T, H, K]: the keys as the convolution returns them, not normalised."""

    g: Tensor
    """[layers, requests, T, HV] float32: the logarithm of the decay."""

    def layer(self, index: int) -> "WindowRecords":
        """The records of one layer: views without the first axis."""
        return WindowRecords(self.u[index], self.k[index], self.g[index])


class RecordRings(NamedTuple):
    """Rows of records [layers, rings, RECORD_ROWS, ...] that the cached states do not have yet.

    The first rows of a request's ring are live: committed after its cached state. A window reads
    them and writes its own rows behind them; its commit adds those of its committed tokens. If the
    next window would not fit then, it writes the state, and no row is live. All slots of a request
    must be the same one.
    """

    of_row: Tensor
    """[>= requests] int32, the ring of each row of the batch; 0, the null ring: outputs are 0."""
    cursors: Tensor
    """[rings, 2] int32: live rows before the window in flight, which only commits write, and the
    same as its verify found it. So no launch writes what its own programs read."""
    window: int
    """Most tokens of a window."""


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
        rows: gated delta nets of the model, requests of the largest batch, and tokens of the
            longest window (k drafts and one more).
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
