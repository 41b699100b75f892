"""Gated delta nets on a CPU: vLLM's operator for windows, replaced while a window is staged.

The operator computes a layer's window behind its convolution, in one call, and writes every state.
It is a function of a module, told apart by the layer's parameter A_log. vLLM's CPU kernels keep the
last two axes of a state the other way round.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.plugin.layers import TargetLayers, set_up
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.states import StateKernels, WindowStates, find_states, reference_commit
from nwor_bench.plugin.window import Window
from nwor_kernels.gated_delta.reference import verify_window_reference

OPERATOR = "fused_sigmoid_gating_delta_rule_update_spec_cpu"

KERNELS = StateKernels(verify_window_reference, reference_commit)


def set_up_states(
    runner: Any, target: TargetLayers, window: Window
) -> tuple[WindowStates | None, str | None]:
    """The states of vLLM's V1 runner, or why stock writes them; (None, None) without such layers.

    See `set_up`.
    """
    if not target.recurrent:
        return None, None
    length = runner.num_spec_tokens + 1

    def make() -> WindowStates:
        layers = find_states(runner, target, transposed)
        sizes = {"length": length, "requests": runner.max_num_reqs, "dtype": runner.dtype}
        return WindowStates(layers, window, kernels=KERNELS, **sizes)

    return set_up(make)


def transposed(states: Tensor) -> Tensor:
    """[slots, HV, V, K] of states that a CPU keeps as [slots, HV, K, V] in the same memory."""
    slots, heads, values, keys = states.shape
    return states.view(slots, heads, keys, values).transpose(-1, -2)


def operator_patch(states: WindowStates) -> Patch:
    """The patch of vLLM's operator; not yet applied."""
    from vllm import _custom_ops

    numbers = {id(layer.layer.A_log): number for number, layer in enumerate(states.layers)}
    known = ref(states)  # vLLM's module outlives the engine

    def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def update(**named: Any) -> Tensor:
            states, number = known(), numbers.get(id(named["A_log"]))
            if states is None or number is None:
                return original(**named)
            metadata = get_forward_context().attn_metadata[states.layers[number].name]
            if not states.stages(metadata):
                return original(**named)
            mixed = torch.cat([named[part].flatten(1) for part in ("q", "k", "v")], dim=-1)
            out = torch.zeros_like(named["v"])
            states.verify(number, mixed, named["a"], named["b"], metadata, out)
            return out

        return update

    return Patch(_custom_ops, OPERATOR, wrap)
