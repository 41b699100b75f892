"""Check the convolution in front of a gated delta net: stock's, once more, on the same inputs.

Staging leaves it to stock, or calls stock's kernel itself; either way the convolution state of each
request must be the one that stock leaves, bit for bit: it holds inputs, and no arithmetic.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.observe.errors import bits_of
from nwor_bench.plugin.observe.state_trace import StateCall
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.state_layers import StateLayer


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
    output = _stock(layer.layer, call.mixed[:tokens].clone(), state, metadata)
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


def _stock(layer: Any, mixed: Tensor, state: Tensor, metadata: Any) -> Tensor:
    """[tokens, channels] by stock's convolution, which moves `state` on.

    The kernel is vLLM's own, not the name by which its layers call it.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    rows = state if is_conv_state_dim_first() else state.transpose(-1, -2)
    if state.device.type == "cpu":
        return _stock_on_a_cpu(layer, mixed, rows, metadata)
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    weight, table = layer.conv1d.weight, metadata.spec_state_indices_tensor
    found: Tensor = causal_conv1d_update(
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
    return found


def _stock_on_a_cpu(layer: Any, mixed: Tensor, rows: Tensor, metadata: Any) -> Tensor:
    """vLLM convolves there within the function that also recurs: that is cut off."""
    from vllm import _custom_ops

    from nwor_bench.plugin.runner_v1.cpu_states import OPERATOR, STOCK_FORWARD

    assert STOCK_FORWARD is not None
    found: list[Tensor] = []

    def recur(**named: Any) -> Tensor:
        found.append(torch.cat([named[part].flatten(1) for part in ("q", "k", "v")], dim=-1))
        return torch.zeros_like(named["v"])

    cut = Patch(_custom_ops, OPERATOR, lambda original: recur)
    cut.apply()
    try:
        width, length = layer.conv1d.weight.size(-1), rows.size(-1)
        gates = mixed.new_zeros(len(mixed), 1)
        STOCK_FORWARD(layer, metadata, mixed, gates, gates, rows, None, width, length)
    finally:
        cut.undo()
    return found[0]
