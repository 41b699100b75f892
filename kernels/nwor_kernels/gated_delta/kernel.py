"""Verify and commit of gated delta nets in Triton; `reference.py` has the formulas.

Written from the committed state S, with c = cumsum(g), all tokens of a window at once:

    u_t = beta_t (v_t - e^c_t S k_t - sum_(i < t) e^(c_t - c_i) (k_i . k_t) u_i)
    o_t = e^c_t S q_t + sum_(i <= t) e^(c_t - c_i) (k_i . q_t) u_i

So a window reads S once, for one product with all its k and q; control reads it again. Keys and
queries stay as the convolution returned them, in 16 bits, and their lengths are factors taken out
of the products: a 16-bit vector's product is exact in tensor cores, and so is a float32 state's as
a sum of three bfloat16.

With rings S is older by the rows of a request's ring. With C_i = cumsum of their g and C its end,
e^C S x + sum_i e^(C - C_i) u_i (k_i . x) stands in the place of S x, for k and q.
"""

import triton
import triton.language as tl

from nwor_kernels.gated_delta.reference import NORM_EPS
from nwor_kernels.limits import RECORD_ROWS

_NORM_EPS = tl.constexpr(NORM_EPS)
_RECORD_ROWS = tl.constexpr(RECORD_ROWS)


@triton.jit
def verify_kernel(
    mixed,
    a,
    b,
    A_log,
    dt_bias,
    state,
    state_indices,
    accepted,
    query_start_loc,
    out,
    recorded_u,
    recorded_k,
    recorded_g,
    gate,
    norm_weight,
    rings,
    cursors,
    STRIDES: tl.constexpr,
    STATE_STRIDES: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
    WRITES_STATES: tl.constexpr,
):
    """One program: ROWS rows of the state of one value head and request, read KEYS columns at a
    time so that loads run ahead of the products.

    A matrix w [ROWS, 2 TOKENS] holds u in its first TOKENS columns and o in the others. Both begin
    as a product of the state, with k or q, and token i adds u_i times a row of factors to the
    later columns of both.

    STRIDES are those of the rows of mixed, a, b, out, state_indices and gate, STATE_STRIDES those
    of slots, heads and rows. COLUMNS: of state_indices. T: most tokens of a window, and without
    `rings` rows of a request's records.
    """
    value_head, request = tl.program_id(1), tl.program_id(2)
    head = value_head // (HV // H)
    table = state_indices + request.to(tl.int64) * STRIDES[4]
    state_column = tl.arange(0, triton.next_power_of_2(COLUMNS))
    # All columns, so that no load of a slot waits for that of `accepted`.
    slots = tl.load(table + state_column, mask=state_column < COLUMNS, other=0)
    is_source = state_column == tl.load(accepted + request) - 1
    slot = tl.sum(tl.where(is_source, slots, 0), 0).to(tl.int64)
    first = tl.load(query_start_loc + request).to(tl.int64)
    length = (tl.load(query_start_loc + request + 1).to(tl.int64) - first).to(tl.int32)
    length = tl.minimum(length, T)
    if length <= 0:
        return
    v_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 2 * TOKENS)
    token, is_q = column % TOKENS, column >= TOKENS
    known = token < length
    is_u, is_o = known & (column < TOKENS), known & is_q
    if rings is not None:
        own = tl.maximum(tl.load(rings + request), 0).to(tl.int64)
        live = tl.minimum(tl.load(cursors + 2 * own), _RECORD_ROWS - T)  # never past the ring
        slot = tl.where(own > 0, slot, 0)
        if (tl.program_id(0) == 0) & (value_head == 0):
            tl.store(cursors + 2 * own + 1, live)
    if slot <= 0:
        nothing = tl.zeros([ROWS, 2 * TOKENS], out.dtype.element_ty)
        out_at = out + (first + token) * STRIDES[3] + value_head * V
        tl.store(out_at[None, :] + v_row[:, None], nothing, mask=is_o[None, :])
        return
    in_head = state + slot * STATE_STRIDES[0] + value_head * STATE_STRIDES[1]
    mixed_at = mixed + (first + token) * STRIDES[0]
    kq_at = mixed_at + (head + (1 - column // TOKENS) * H) * K  # multiples of K: wide loads
    v_at = mixed_at + 2 * H * K + value_head * V
    # Loaded here, used behind the loop: nothing that waits stands before the state's loads.
    v = tl.load(v_at[None, :] + v_row[:, None], mask=is_u[None, :], other=0.0)
    g_token = tl.arange(0, TOKENS)
    g_at = a + (first + g_token) * STRIDES[1] + value_head
    x = tl.load(g_at, mask=g_token < length, other=0.0)
    bias, log_rate = tl.load(dt_bias + value_head), tl.load(A_log + value_head)
    beta_at = b + (first + token) * STRIDES[2] + value_head
    beta = tl.load(beta_at, mask=known, other=0.0)

    row = tl.arange(0, _RECORD_ROWS)
    first_line = request.to(tl.int64) * T if rings is None else own * _RECORD_ROWS + live
    line = first_line + token
    k_at = recorded_k + (line * H + head) * K
    others = tl.program_id(0) + value_head % (HV // H)  # 0 in the one program that records k
    records_k = is_u & (token + others == token)
    w = tl.zeros([ROWS, 2 * TOKENS], tl.float32)
    products = tl.zeros([_RECORD_ROWS, 2 * TOKENS], tl.float32)
    if rings is not None:  # before the loop it takes the fewest registers
        old = tl.arange(0, _RECORD_ROWS)
        old_line = own * _RECORD_ROWS + old
        g_ring = tl.load(recorded_g + old_line * HV + value_head, mask=old < live, other=0.0)
        lanes = tl.arange(0, K)
        k_ring_at = recorded_k + (old_line * H + head) * K
        k_ring = tl.load(k_ring_at[:, None] + lanes[None, :], mask=(old < live)[:, None], other=0.0)
        u_ring_at = recorded_u + (old_line * HV + value_head) * V
        u_ring = tl.load(u_ring_at[None, :] + v_row[:, None], mask=(old < live)[None, :], other=0.0)
        all_kq = tl.load(kq_at[:, None] + lanes[None, :], mask=known[:, None], other=0.0)
        seen = _dot(k_ring, tl.trans(all_kq), products, DOT) * tl.exp(_since(g_ring))[:, None]
        by_ring = _wide_product(u_ring, seen, w, DOT)
    squares = tl.zeros([2 * TOKENS], tl.float32)
    for begin in range(0, K, KEYS):
        k_lane = begin + tl.arange(0, KEYS)
        s = tl.load(in_head + v_row[:, None] * STATE_STRIDES[2] + k_lane[None, :])
        kq = tl.load(kq_at[:, None] + k_lane[None, :], mask=known[:, None], other=0.0)
        tl.store(k_at[:, None] + k_lane[None, :], kq, mask=records_k[:, None])
        wide_kq = kq.to(tl.float32)
        squares += tl.sum(wide_kq * wide_kq, 1)
        columns = tl.trans(kq)
        keys = kq  # 16 rows, of which those of q are not used
        if TOKENS > 8:
            key_at = mixed + (first + row) * STRIDES[0] + (H + head) * K
            kept = (row < length)[:, None]
            keys = tl.load(key_at[:, None] + k_lane[None, :], mask=kept, other=0.0)
        products = _dot(keys, columns, products, DOT)
        # Last, so that Triton solves for w in this product's layout.
        w = _product(s.to(tl.float32), columns, w, PARTS, DOT)

    if rings is not None:
        w = w * tl.exp(tl.sum(g_ring, 0)) + by_ring
    if gate is not None:
        gate_at = gate + (first + token) * STRIDES[5] + value_head * V
        z = tl.load(gate_at[None, :] + v_row[:, None], mask=is_o[None, :], other=0.0)
    x = x.to(tl.float32) + bias.to(tl.float32)
    softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))), x)
    g = tl.where(g_token < length, -tl.exp(log_rate.to(tl.float32)) * softplus, 0.0)
    beta = tl.sigmoid(beta.to(tl.float32))
    over_length = tl.rsqrt(squares + _NORM_EPS)
    factor = over_length * tl.where(is_q, SCALE, -beta)
    decay = tl.sum(tl.where(g_token[None, :] <= token[:, None], g[None, :], 0.0), 1)
    w = w * (tl.exp(decay) * factor)[None, :] + v.to(tl.float32) * beta[None, :]
    row_decay = tl.sum(tl.where(g_token[None, :] <= row[:, None], g[None, :], 0.0), 1)
    later = token[None, :] + is_q.to(tl.int32)[None, :] > row[:, None]
    since = tl.where(later, decay[None, :] - row_decay[:, None], 0.0)
    products = tl.where(later, products * tl.exp(since) * factor[None, :], 0.0)
    for i in tl.static_range(T):
        u = tl.sum(tl.where(column[None, :] == i, w * over_length[None, :], 0.0), 1)
        adds = tl.sum(tl.where(row[:, None] == i, products, 0.0), 0)
        w += u[:, None] * adds[None, :]

    u_over_length = w * over_length[None, :]
    u_at = recorded_u + (line * HV + value_head) * V
    tl.store(u_at[None, :] + v_row[:, None], u_over_length, mask=is_u[None, :])
    if tl.program_id(0) == 0:
        g_line = first_line + g_token
        tl.store(recorded_g + g_line * HV + value_head, g, mask=g_token < length)

    if WRITES_STATES:
        k_lane = tl.arange(0, K)
        in_state = v_row[:, None] * STATE_STRIDES[2] + k_lane[None, :]
        s = tl.load(in_head + in_state).to(tl.float32)
        for i in range(length):
            u = tl.sum(tl.where(column[None, :] == i, u_over_length, 0.0), 1)
            k = tl.load(mixed + (first + i) * STRIDES[0] + (H + head) * K + k_lane)
            s *= tl.exp(tl.sum(tl.where(g_token == i, g, 0.0), 0))
            s += u[:, None] * k.to(tl.float32)[None, :]
            to = tl.load(table + i).to(tl.int64)
            if to > 0:
                at = state + to * STATE_STRIDES[0] + value_head * STATE_STRIDES[1] + in_state
                tl.store(at, s.to(state.dtype.element_ty))

    if gate is not None:  # the whole of V is in this program
        rounded = w.to(out.dtype.element_ty).to(tl.float32)
        root = tl.rsqrt(tl.sum(rounded * rounded, 0) / V + EPS)
        z = z.to(tl.float32)
        activated = tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
        weight = tl.load(norm_weight + v_row).to(tl.float32)
        w = rounded * root[None, :] * weight[:, None] * activated
    out_at = out + (first + token) * STRIDES[3] + value_head * V
    tl.store(out_at[None, :] + v_row[:, None], w.to(out.dtype.element_ty), mask=is_o[None, :])


@triton.jit(do_not_specialize=["num_requests", "room"])
def commit_kernel(
    layers,
    recorded_u,
    recorded_k,
    recorded_g,
    rings,
    cursors,
    accepted,
    committed,
    num_requests,
    room,
    STATE_STRIDES: tl.constexpr,
    STATE_ELEMENT: tl.constexpr,
    STATE_ALIGNMENT: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    T: tl.constexpr,
    REQUESTS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    DOT: tl.constexpr,
):
    """One program: ROWS rows of the state of one value head and layer, for one request; with
    rings for some, since most have room.

    `layers` [layers, 4] int64: addresses of the state and of its group's slots, the strides of
    these and how many a request has. REQUESTS, T: rows of the records.
    """
    request = tl.program_id(1)
    layer, value_head = tl.program_id(2) // HV, tl.program_id(2) % HV
    if request >= num_requests:
        return
    if rings is None:
        count = tl.load(committed + request).to(tl.int32)
        row = layers + layer * 4
        slots = tl.load(row + 1).to(tl.pointer_type(tl.int32)) + request * tl.load(row + 2)
        slots_each = tl.load(row + 3).to(tl.int32)
        source = _slot(slots, tl.load(accepted + request), slots_each)
        target = _slot(slots, count, slots_each)
        if (source <= 0) | (target <= 0):
            return
        _write_state(
            row, layer, request, count, source, target, value_head, recorded_u, recorded_k,
            recorded_g, STATE_STRIDES, STATE_ELEMENT, STATE_ALIGNMENT, H, HV, K, V, T, REQUESTS,
            ROWS, PARTS, DOT,
        )  # fmt: skip
    else:
        for one in range(request, num_requests, tl.num_programs(1)):
            own = tl.maximum(tl.load(rings + one), 0).to(tl.int64)
            count = tl.load(cursors + 2 * own + 1) + tl.load(committed + one).to(tl.int32)
            full = (own > 0) & (count + room > T)
            if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
                tl.store(cursors + 2 * own, tl.where((own > 0) & (count + room <= T), count, 0))
            if full:
                row = layers + layer * 4
                slots = tl.load(row + 1).to(tl.pointer_type(tl.int32)) + one * tl.load(row + 2)
                slot = _slot(slots, tl.load(accepted + one), tl.load(row + 3).to(tl.int32))
                if slot > 0:
                    _write_state(
                        row, layer, own, count, slot, slot, value_head, recorded_u, recorded_k,
                        recorded_g, STATE_STRIDES, STATE_ELEMENT, STATE_ALIGNMENT, H, HV, K, V, T,
                        REQUESTS, ROWS, PARTS, DOT,
                    )  # fmt: skip


@triton.jit
def _write_state(
    row, layer, record, count, source, target, value_head, recorded_u, recorded_k, recorded_g,
    STATE_STRIDES: tl.constexpr, STATE_ELEMENT: tl.constexpr, STATE_ALIGNMENT: tl.constexpr,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr,
    REQUESTS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Write a request's state behind the first `count` rows of its records to slot `target`."""
    v_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k_lane = tl.arange(0, K)
    in_state = value_head * STATE_STRIDES[1] + v_row[:, None] * STATE_STRIDES[2] + k_lane[None, :]
    state = tl.load(row).to(tl.pointer_type(STATE_ELEMENT))
    state = tl.multiple_of(state, STATE_ALIGNMENT)
    s = tl.load(state + source * STATE_STRIDES[0] + in_state).to(tl.float32)

    token = tl.arange(0, _RECORD_ROWS)
    kept = token < tl.minimum(count, T)
    line = (layer.to(tl.int64) * REQUESTS + record) * T + token
    g = tl.load(recorded_g + line * HV + value_head, mask=kept, other=0.0)
    u_at = recorded_u + (line * HV + value_head) * V
    u = tl.load(u_at[None, :] + v_row[:, None], mask=kept[None, :], other=0.0)
    k_at = recorded_k + (line * H + value_head // (HV // H)) * K
    k = tl.load(k_at[:, None] + k_lane[None, :], mask=kept[:, None], other=0.0)
    s = _product(u * tl.exp(_since(g))[None, :], k, s * tl.exp(tl.sum(g, 0)), PARTS, DOT)
    tl.store(state + target * STATE_STRIDES[0] + in_state, s.to(STATE_ELEMENT))


@triton.jit
def _since(g):
    """Logarithm of the decay from each row of records to their end."""
    row = tl.arange(0, _RECORD_ROWS)
    return tl.sum(tl.where(row[:, None] > row[None, :], g[:, None], 0.0), 0)


@triton.jit
def _slot(table, count, columns):
    """The slot of the state after `count` tokens; 0, which is no slot, if there is none."""
    exists = (count > 0) & (count <= columns)
    return tl.load(table + count - 1, mask=exists, other=0).to(tl.int64)


@triton.jit
def _product(wide, narrow, total, PARTS: tl.constexpr, DOT: tl.constexpr):
    """total + wide @ narrow, with `wide` in float32 taken as a sum of PARTS bfloat16.

    Each part is the upper half of the bits left: 8 of 24 significant bits, at a mask's price; GPUs
    convert to bfloat16 slowly. NaN and infinity give NaN.
    """
    if PARTS == 1:
        return _dot(wide.to(tl.bfloat16), narrow, total, DOT)
    for _ in tl.static_range(PARTS):
        upper = wide.to(tl.uint32, bitcast=True) >> 16
        wide -= (upper << 16).to(tl.float32, bitcast=True)
        part = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        total = _dot(part, narrow, total, DOT)
    return total


@triton.jit
def _wide_product(left, right, total, DOT: tl.constexpr):
    """total + left @ right, both float32: those products of their bfloat16 parts that matter."""
    for i in tl.static_range(3):
        part, rest = left.to(tl.bfloat16), right
        left -= part.to(tl.float32)
        for _ in tl.static_range(3 - i):
            other = rest.to(tl.bfloat16)
            rest -= other.to(tl.float32)
            total = _dot(part, other, total, DOT)
    return total


@triton.jit
def _dot(left, right, total, DOT: tl.constexpr):
    """total + left @ right, exact products: DOT is bf16, or the precision of float32 operands."""
    if DOT == "bf16":
        total = tl.dot(left, right, total)
    else:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision=DOT)
    return total
