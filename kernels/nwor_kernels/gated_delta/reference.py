"""A window of gated delta nets: outputs and records, then one state a request. Torch reference.

For each value head, with the state S [V, K], vLLM's `fused_sigmoid_gating_delta_rule_update` does

    g_t = -exp(A_log) softplus(a_t + dt_bias),  beta_t = sigmoid(b_t)
    u_t = beta_t (v_t - e^g_t S_(t-1) k_t)
    S_t = e^g_t S_(t-1) + u_t k_t',  o_t = S_t q_t

with k and q normalised to length 1 and q times `scale` (Yang et al., Gated Delta Networks, 2024,
equation 10), and writes S_t to the slot of each token. Here a window keeps (u, k, g) instead, and
the state after n of its tokens is, with c = cumsum(g),

    S_n = e^c_n S_0 + sum_(i <= n) e^(c_n - c_i) u_i k_i'

With rings S_0 may be several windows old, and a window begins from S_n of its ring's live rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nwor_kernels.gated_delta.records import GatedNorm, RecordRings, WindowInputs, WindowRecords

NORM_EPS = 1e-6
"""Added to the squared length of k and q, as vLLM's kernels do."""


def verify_window_reference(
    inputs: WindowInputs,
    out: Tensor,
    records: WindowRecords,
    *,
    scale: float,
    norm: GatedNorm | None = None,
    write_states: bool = False,
    rings: RecordRings | None = None,
) -> None:
    """Outputs and records of one layer's window, from the committed states; no state is written.

    A row without tokens, and what is past the last row's tokens, writes nothing. A row whose
    source slot is null (<= 0) writes only zeros to its outputs, as vLLM's CUDA kernel does; vLLM's
    Triton kernel leaves fresh memory there.

    Args:
        out: [tokens, HV, V], written.
        records: of this layer (`WindowRecords.layer`), at least as many rows as requests.
        scale: factor of q, K ** -0.5 in vLLM.
        norm: also apply vLLM's gated RMS norm, to the outputs rounded to `out`'s dtype.
        write_states: write the state after token t to column t, as vLLM does; without rings.
        rings: of the records, if windows begin from the cached states and live rows.
    """
    mixed, a, b, log_decay, dt_bias, state, state_indices, accepted, query_start_loc = inputs
    key_dim, window = state.shape[3], rings.window if rings else records.u.shape[1]
    value_heads, value_dim = state.shape[1:3]
    key_heads = records.k.shape[2]
    q, k, v = torch.split(mixed, [key_heads * key_dim] * 2 + [value_heads * value_dim], dim=-1)
    q, k = (part.view(-1, key_heads, key_dim) for part in (q, k))
    v = v.view(-1, value_heads, value_dim)
    g = -log_decay.float().exp() * functional.softplus(a.float() + dt_bias.float(), threshold=20.0)
    beta = b.float().sigmoid()
    requests = state_indices.shape[0]
    first = query_start_loc[:requests].long()
    length = query_start_loc[1 : requests + 1].long() - first
    slot = _slots(state_indices, accepted[:requests])
    record, line = torch.arange(requests, device=slot.device), torch.zeros_like(slot)
    if rings is not None:
        record = rings.of_row[:requests].long()
        slot, line = slot.where(record > 0, 0), rings.cursors[record, 0].long()
        rings.cursors[record, 1] = rings.cursors[record, 0]
    for token in range(window):
        no_state = ((slot <= 0) & (length > token)).nonzero()[:, 0]
        out[first[no_state] + token] = 0
    rows = ((slot > 0) & (length > 0)).nonzero()[:, 0]
    current = state_behind(state[slot[rows]], records, record[rows], line[rows])
    for token in range(window):
        still = length[rows] > token
        rows, current = rows[still], current[still]
        at = first[rows] + token
        q_t, _ = _normalised(q[at], value_heads)
        k_t, key_norm = _normalised(k[at], value_heads)
        current = current * g[at].exp()[..., None, None]
        u = beta[at][..., None] * (v[at].float() - torch.einsum("rhvk,rhk->rhv", current, k_t))
        current = current + u[..., :, None] * k_t[..., None, :]
        output = torch.einsum("rhvk,rhk->rhv", current, q_t * scale).to(out.dtype)
        out[at] = output if norm is None else gated_norm(output, norm, at)
        own, place = record[rows], line[rows] + token
        records.u[own, place] = u / key_norm
        records.k[own, place] = k[at]
        records.g[own, place] = g[at]
        if write_states:
            to = state_indices[rows, token].long()
            state[to[to > 0]] = current[to > 0].to(state.dtype)


def commit_states_reference(
    states: Sequence[Tensor],
    groups: Sequence[int],
    state_indices: Sequence[Tensor],
    records: WindowRecords,
    rings: RecordRings | None,
    accepted: Tensor,
    committed: Tensor,
    room: int = 0,
) -> None:
    """Write every layer's state after the committed tokens of each row, one state a row.

    Nothing is written for a row that commits no token, or of which a slot is null (<= 0). With
    rings a row's tokens are added to its live rows, and its state is written if less than `room`
    rows are left.

    Args:
        states: one tensor a layer, [slots, HV, V, K], any strides.
        groups: each layer's entry of `state_indices`: its KV-cache group.
        state_indices: one tensor a group, [>= requests, >= T] int32.
        records: of all layers.
        rings: of the records, if verify had them.
        accepted: [>= requests] int32: the state is read from column accepted - 1, as the window's
            outputs were.
        committed: [requests] int32, accepted drafts and the bonus token, at most the row's tokens;
            the state is written to column committed - 1. Rounded once, to the states' dtype.
        room: with rings, rows that the next window needs; all: the states are made current.
    """
    requests = len(committed)
    record, count = torch.arange(requests, device=committed.device), committed.long()
    writes = torch.ones_like(count, dtype=torch.bool)
    if rings is not None:
        record = rings.of_row[:requests].long()
        count = rings.cursors[record, 1] + count
        writes = (record > 0) & (count + room > records.u.shape[2])
        rings.cursors[record, 0] = count.where((record > 0) & ~writes, 0).int()
        committed = accepted[:requests].where(count > 0, 0)
    for layer, (state, group) in enumerate(zip(states, groups, strict=True)):
        table = state_indices[group][:requests]
        source, target = _slots(table, accepted[:requests]), _slots(table, committed)
        rows = (writes & (source > 0) & (target > 0)).nonzero()[:, 0]
        new = state_behind(state[source[rows]], records.layer(layer), record[rows], count[rows])
        state[target[rows]] = new.to(state.dtype)


def state_behind(state: Tensor, records: WindowRecords, record: Tensor, count: Tensor) -> Tensor:
    """States [rows, HV, V, K] in float32 behind so many of their records; never waits.

    Args:
        state: [rows, HV, V, K], before the first record.
        records: of the states' layer.
        record: [rows] int64, each one's row of the records.
        count: [rows] int, tokens; records behind them are not looked at.
    """
    u, k, g = (part[record] for part in records)
    kept = torch.arange(u.shape[1], device=u.device) < count[:, None]
    g = g.where(kept[..., None], 0)
    total = g.sum(1)
    u = u.where(kept[..., None, None], 0) * (total[:, None] - g.cumsum(1)).exp()[..., None]
    k = k.float().where(kept[..., None, None], 0).repeat_interleave(u.shape[2] // k.shape[2], dim=2)
    return state.float() * total.exp()[..., None, None] + torch.einsum("rnhv,rnhk->rhvk", u, k)


def _slots(table: Tensor, count: Tensor) -> Tensor:
    """Each row's slot after `count` tokens, [requests] int64; 0 (null) if it has none."""
    column = (count.long() - 1).clamp(0, table.shape[1] - 1)
    slot = table.gather(1, column[:, None])[:, 0].long()
    return slot.where(column == count - 1, 0)


def _normalised(vectors: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """[rows, HV, K] of length 1, one for each value head, and the lengths [rows, HV, 1]."""
    wide = vectors.float().repeat_interleave(value_heads // vectors.shape[1], dim=1)
    length = (wide.square().sum(-1, keepdim=True) + NORM_EPS).sqrt()
    return wide / length, length


def gated_norm(output: Tensor, norm: GatedNorm, at: Tensor | slice) -> Tensor:
    """vLLM's RMS norm of each head's rounded output, times weight and gate.

    Args:
        output: [rows, HV, V], rounded.
        at: the rows' tokens, of the gate.
    """
    wide, gate = output.float(), norm.gate[at].float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    activated = gate.sigmoid() if norm.activation == "sigmoid" else functional.silu(gate)
    return (wide * norm.weight.float() * activated).to(output.dtype)
