"""Check each gated delta net of a window on its own inputs: the local gate's part for states.

Of a checked window each layer's inputs, outputs and first states are copied (`StateTrace`). After
the commit stock's kernel computes the same window from the same states, elsewhere: the state that
the next window reads must be stock's but for float32's sums, and one rounding of a narrower cache.
Control windows write the state after every token, so all of them are compared. The convolution in
front is checked likewise (`convolution_checks`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.convolution_checks import check_convolution
from nwor_bench.plugin.observe.state_trace import SAMPLE, StateCall, StateTrace
from nwor_bench.plugin.state_layers import StateLayer, shape_of
from nwor_kernels.gated_delta.records import GatedNorm
from nwor_kernels.gated_delta.reference import gated_norm


def check_states(
    layers: Sequence[StateLayer],
    trace: StateTrace,
    num_sampled: Sequence[int],
    *,
    is_control: bool,
) -> list[dict[str, Any]]:
    """Measurements of each layer of a window that has been committed.

    Args:
        num_sampled: tokens that each request got.

    Returns:
        `layer`, `state` and `convolution`; None if inputs or outputs were not seen.
    """
    found = []
    for number, call in sorted(trace.calls.items()):
        layer, state, convolution = layers[number], None, None
        if call is not None and call.output is not None:
            state = check_state(layer, call, num_sampled, is_control=is_control)
            convolution = check_convolution(layer, call, state["requests"])
        found.append({"layer": layer.name, "state": state, "convolution": convolution})
    return found


def check_state(
    layer: StateLayer, call: StateCall, num_sampled: Sequence[int], *, is_control: bool
) -> dict[str, Any]:
    """Measurements of one layer's states and outputs."""
    rows = min(SAMPLE, len(num_sampled))
    window, device = call.indices.shape[1], layer.state.device
    table = torch.arange(1, rows * window + 1, dtype=torch.int32, device=device)
    table = table.view(rows, window)
    theirs = _scratch(layer, rows * window + 1)
    row = torch.arange(rows, device=device)
    theirs[table[row, call.accepted[:rows].long() - 1].long()] = call.first[:rows]
    bounds = call.bounds[: rows + 1]
    tokens = int(bounds[-1])
    output = _stock(layer, call, theirs, table, bounds, tokens)

    length = bounds.diff()
    column = torch.arange(window, device=device)
    counts = torch.tensor([max(each, 1) for each in num_sampled[:rows]], device=device)
    wanted = column < length[:, None] if is_control else column == counts[:, None] - 1
    wanted &= (length > 0)[:, None] & (call.indices[:rows] > 0)
    at_row, at_column = wanted.nonzero(as_tuple=True)
    ours = layer.state[call.indices[at_row, at_column].long()]
    # Of each request and head, over the window: the state may become much smaller in it.
    passed = theirs[table.long()].float().abs().amax((1, 3, 4))
    largest = torch.maximum(passed, call.first[:rows].float().abs().amax((2, 3)))[at_row]
    worst, allowed, place = _furthest(
        ours, theirs[table[at_row, at_column].long()], largest, _sums(layer, window),
        _roundings(layer, window),
    )  # fmt: skip
    assert call.output is not None
    head_largest = output.abs().amax(dim=(0, 2)).clamp(min=1e-30)
    apart = (call.output[:tokens].float() - output).abs().amax(dim=(0, 2)) / head_largest
    apart = apart.nan_to_num(nan=torch.inf)
    return {
        "requests": rows,
        "compared": len(at_row),
        "error": _number(worst),
        "allowed": allowed,
        "request": int(at_row[place[0]]) if len(at_row) else None,
        "token": int(at_column[place[0]]) if len(at_row) else None,
        "head": place[1],
        "output_error": _number(float(apart.max())),
        "output_allowed": 2 * torch.finfo(call.output.dtype).eps,
        "output_head": int(apart.argmax()),
    }


def _furthest(
    ours: Tensor, theirs: Tensor, largest: Tensor, sums: float, roundings: float
) -> tuple[float, float, list[int]]:
    """(Distance, allowed distance, [state, head]) where they are furthest apart for what is
    allowed; both over the head's largest value. Nothing is compared without states.

    Args:
        ours, theirs: [states, HV, V, K].
        largest: [states, HV].
        sums: distance over `largest` that float32's sums explain.
        roundings: distance over the value itself that roundings to the cache's dtype explain.
    """
    if not len(ours):
        return 0.0, sums, [0, 0]
    wide, largest = theirs.float(), largest.clamp(min=1e-30)[..., None, None]
    allowed = sums + roundings * wide.abs() / largest
    distance = ((ours.float() - wide).abs() / largest).nan_to_num(nan=torch.inf)
    at = int((distance / allowed).argmax())
    place = [int(each) for each in torch.unravel_index(torch.tensor(at), wide.shape)[:2]]
    return float(distance.flatten()[at]), float(allowed.flatten()[at]), place


def _number(value: float) -> float | None:
    return value if value < float("inf") else None


def _sums(layer: StateLayer, window: int) -> float:
    """Distance from stock's state, over the head's largest value, that float32's sums explain.

    A token changes S to S + beta (v - S k) k^T with |k| = 1. With u = 2^-24 and M the largest |S|,
    the K roundings of a sum S k add up to about u M sqrt(K) if partial sums are up to M sqrt(n);
    they enter the state times beta and k_j, which are at most 1, once a token. Ours and stock's are
    off by that much each, so together by 2 u = eps. Most k_j are near 1 / sqrt(K): vLLM's CPU
    kernel and our reference differ by up to 3.6e-7 M (K 64 to 256, windows of 2 to 9 tokens), at
    most a sixth of it.
    """
    return window * layer.state.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps


def _roundings(layer: StateLayer, window: int) -> float:
    """Relative distance of two roundings; vLLM's CPU kernel rounds after every token."""
    if layer.state.dtype is torch.float32:
        return 0.0
    steps = window if layer.state.device.type == "cpu" else 1
    return steps * torch.finfo(layer.state.dtype).eps


def _scratch(layer: StateLayer, slots: int) -> Tensor:
    """[slots, HV, V, K] zeros, laid out as the layer's cache."""
    _, heads, values, keys = layer.state.shape
    swapped = layer.state.stride(2) == 1
    sizes = (slots, heads, keys, values) if swapped else (slots, heads, values, keys)
    made = torch.zeros(sizes, dtype=layer.state.dtype, device=layer.state.device)
    return made.transpose(-1, -2) if swapped else made


def _stock(
    layer: StateLayer, call: StateCall, state: Tensor, table: Tensor, bounds: Tensor, tokens: int
) -> Tensor:
    """Stock's outputs [tokens, HV, V] in float32; it writes the state after every token."""
    shape = shape_of(layer)
    heads, width = shape["key_heads"], shape["key_dim"]
    sizes = [heads * width, heads * width, shape["value_heads"] * shape["value_dim"]]
    assert call.convolved is not None
    q, k, v = torch.split(call.convolved[:tokens], sizes, dim=-1)
    own, accepted = layer.layer, call.accepted[: len(table)]
    given = {
        "A_log": own.A_log,
        "dt_bias": own.dt_bias,
        "q": q.reshape(tokens, heads, width),
        "k": k.reshape(tokens, heads, width),
        "v": v.reshape(tokens, shape["value_heads"], shape["value_dim"]),
        "a": call.a[:tokens].contiguous(),
        "b": call.b[:tokens].contiguous(),
        "cu_seqlens": bounds,
        "num_accepted_tokens": accepted,
        "use_qk_l2norm_in_kernel": True,
    }
    if state.device.type == "cpu":
        operator = torch.ops._C.fused_sigmoid_gating_delta_rule_update_spec_cpu
        output = operator(
            initial_state_source=state.transpose(-1, -2), spec_state_indices=table, **given
        )
    else:
        from vllm.third_party.flash_linear_attention import ops

        given |= {name: given[name][None] for name in "qkv"}
        output, _ = ops.fused_sigmoid_gating_delta_rule_update(
            initial_state=state, ssm_state_indices=table, **given
        )
        output = output.squeeze(0)
    if call.gate is not None:
        norm = own.norm
        gated = GatedNorm(call.gate, norm.weight, own.layer_norm_epsilon, norm.activation)
        output = gated_norm(output, gated, slice(tokens))
    return output.view(tokens, shape["value_heads"], -1).float()
