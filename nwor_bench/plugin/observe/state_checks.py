"""Check each gated delta net of a window on its own inputs: the local gate's part for states.

Of a checked window each layer's inputs, outputs and first states are copied (`StateTrace`). After
the commit stock's kernel computes the same window from the same states, elsewhere: the state that
the next window reads must be stock's but for float32's sums, and one rounding of a narrower cache.
Control windows write the state after every token, so all of them are compared.

Staging leaves the convolution in front to stock, or calls stock's kernel itself; either way its
state must be the one that stock leaves, bit for bit: it holds inputs, and no arithmetic.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.errors import bits_of
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.state_layers import SAMPLE, StateCall, StateLayer, StateTrace, shape_of
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
    checked = []
    for number, call in sorted(trace.calls.items()):
        layer, state, convolution = layers[number], None, None
        if call is not None and call.output is not None:
            state = check_state(layer, call, num_sampled, is_control=is_control)
            convolution = check_convolution(layer, call, state["requests"])
        checked.append({"layer": layer.name, "state": state, "convolution": convolution})
    return checked


def check_state(
    layer: StateLayer, call: StateCall, num_sampled: Sequence[int], *, is_control: bool
) -> dict[str, Any]:
    """Measurements of one layer's states and outputs."""
    rows = min(SAMPLE, len(num_sampled))
    window, device = call.indices.shape[1], layer.state.device
    table = torch.arange(1, rows * window + 1, dtype=torch.int32, device=device)
    table = table.view(rows, window)
    theirs = _scratch(layer, rows * window + 1, call.first.dtype)
    row = torch.arange(rows, device=device)
    theirs[table[row, call.accepted[:rows].long() - 1].long()] = call.first[:rows]
    bounds = call.bounds[: rows + 1]
    tokens = int(bounds[-1])
    output = _stock_recurrence(layer, call, theirs, table, bounds, tokens)

    length = bounds.diff()
    column = torch.arange(window, device=device)
    counts = torch.tensor([max(sampled, 1) for sampled in num_sampled[:rows]], device=device)
    wanted = column < length[:, None] if is_control else column == counts[:, None] - 1
    wanted &= (length > 0)[:, None] & (call.indices[:rows] > 0)
    at_row, at_column = wanted.nonzero(as_tuple=True)
    slots = call.indices[at_row, at_column].long()
    rings = None if call.rings is None else call.rings[at_row]
    ours = layer.state[slots] if call.current is None else call.current(slots, rings)
    # Of each request and head, over the window: the state may become much smaller in it.
    passed = theirs[1:].view(rows, window, *theirs.shape[1:]).abs().amax((1, 3, 4))
    largest = torch.maximum(passed, call.first[:rows].abs().amax((2, 3)))[at_row].float()
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
    place = [int(index) for index in torch.unravel_index(torch.tensor(at), wide.shape)[:2]]
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


def _scratch(layer: StateLayer, slots: int, dtype: torch.dtype) -> Tensor:
    """[slots, HV, V, K] zeros, laid out as the layer's cache; with rings its states are float32."""
    _, heads, values, keys = layer.state.shape
    swapped = layer.state.stride(2) == 1
    sizes = (slots, heads, keys, values) if swapped else (slots, heads, values, keys)
    made = torch.zeros(sizes, dtype=dtype, device=layer.state.device)
    return made.transpose(-1, -2) if swapped else made


def _stock_recurrence(
    layer: StateLayer, call: StateCall, state: Tensor, table: Tensor, bounds: Tensor, tokens: int
) -> Tensor:
    """Stock's outputs [tokens, HV, V] in float32; it writes the state after every token."""
    shape = shape_of(layer)
    heads, width = shape["key_heads"], shape["key_dim"]
    sizes = [heads * width, heads * width, shape["value_heads"] * shape["value_dim"]]
    assert call.convolved is not None
    q, k, v = torch.split(call.convolved[:tokens], sizes, dim=-1)
    net, accepted = layer.layer, call.accepted[: len(table)]
    given = {
        "A_log": net.A_log,
        "dt_bias": net.dt_bias,
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
        norm = net.norm
        gated = GatedNorm(call.gate, norm.weight, net.layer_norm_epsilon, norm.activation)
        output = gated_norm(output, gated, slice(tokens))
    return output.view(tokens, shape["value_heads"], -1).float()


def check_convolution(layer: StateLayer, call: StateCall, requests: int) -> dict[str, Any]:
    """Measurements of one layer's convolution of a window.

    Args:
        requests: first ones of the window, which are compared.

    Returns:
        How many states were `compared`, their `differing` elements and the first request that has
        one; the largest distance of what our kernel was given from stock's output, over that
        channel's largest value, and the allowed one.
    """
    assert call.convolved is not None
    kept = layer.layer.kv_cache[0]
    bounds = call.bounds[: requests + 1]
    tokens, slots = int(bounds[-1]), call.indices[:requests, 0].long()
    state = torch.zeros_like(kept[: requests + 1])  # slot 0 is nobody's
    state[1:] = call.convolution[:requests]
    table = call.indices[:requests].clone()
    table[:, 0] = torch.arange(1, requests + 1, device=table.device)
    metadata = SimpleNamespace(
        num_spec_decodes=requests,
        spec_state_indices_tensor=table,
        num_accepted_tokens=call.accepted[:requests],
        spec_query_start_loc=bounds,
    )
    output = _stock_convolution(layer.layer, call.mixed[:tokens].clone(), state, metadata)
    differing = bits_of(kept[slots.clamp(min=0)]) != bits_of(state[1:])
    compared = (slots > 0) & (bounds.diff() > 0)
    differing &= compared.view(-1, *[1] * (differing.dim() - 1))
    of_request = differing.flatten(1).sum(1)
    largest = output.float().abs().amax(0).clamp(min=1e-30)
    error = float(((call.convolved[:tokens].float() - output.float()).abs() / largest).max())
    return {
        "compared": int(compared.sum()),
        "differing": int(of_request.sum()),
        "request": int((of_request > 0).int().argmax()),
        "output_error": error if error < float("inf") else None,
        "output_allowed": 2 * torch.finfo(output.dtype).eps,
    }


def _stock_convolution(layer: Any, mixed: Tensor, state: Tensor, metadata: Any) -> Tensor:
    """[tokens, channels] by stock's convolution, which moves `state` on.

    The kernel is vLLM's own, not the name by which its layers call it.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    rows = state if is_conv_state_dim_first() else state.transpose(-1, -2)
    if state.device.type == "cpu":
        return _stock_convolution_on_a_cpu(layer, mixed, rows, metadata)
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    weight, table = layer.conv1d.weight, metadata.spec_state_indices_tensor
    convolved: Tensor = causal_conv1d_update(
        mixed,
        rows,
        weight.view(weight.size(0), weight.size(2)),
        layer.conv1d.bias,
        layer.activation,
        conv_state_indices=table[:, 0],
        num_accepted_tokens=metadata.num_accepted_tokens,
        query_start_loc=metadata.spec_query_start_loc,
        max_query_len=table.size(1),
        validate_data=False,
    )
    return convolved


def _stock_convolution_on_a_cpu(layer: Any, mixed: Tensor, rows: Tensor, metadata: Any) -> Tensor:
    """vLLM convolves there within the function that also recurs: that is cut off."""
    from vllm import _custom_ops

    from nwor_bench.plugin.runner_v1.cpu_states import OPERATOR, STOCK_FORWARD

    assert STOCK_FORWARD is not None
    outputs: list[Tensor] = []

    def recur(**named: Any) -> Tensor:
        outputs.append(torch.cat([named[part].flatten(1) for part in ("q", "k", "v")], dim=-1))
        return torch.zeros_like(named["v"])

    cut = Patch(_custom_ops, OPERATOR, lambda original: recur)
    cut.apply()
    try:
        width, length = layer.conv1d.weight.size(-1), rows.size(-1)
        gates = mixed.new_zeros(len(mixed), 1)
        STOCK_FORWARD(layer, metadata, mixed, gates, gates, rows, None, width, length)
    finally:
        cut.undo()
    return outputs[0]
