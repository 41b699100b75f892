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
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from nwor_bench.instruments.contract import CONTRACT, Feature
from nwor_bench.plugin.layers import TargetLayers, set_up
from nwor_bench.plugin.one_slot_states import window_states
from nwor_bench.plugin.patching import Patch, noting
from nwor_bench.plugin.state_layers import find_states
from nwor_bench.plugin.states import StateKernels, WindowStates, reference_commit
from nwor_bench.plugin.window import Window
from nwor_kernels.gated_delta.reference import verify_window_reference

OPERATOR = "fused_sigmoid_gating_delta_rule_update_spec_cpu"

ARGUMENTS = CONTRACT[Feature.STATES].known[f"_custom_ops:{OPERATOR}"]

SPEC_FORWARD = "_spec_forward"
"""vLLM's function of a window, which convolves and then calls the operator."""

STOCK_FORWARD: Callable[..., Tensor] | None = getattr(gdn_attention, SPEC_FORWARD, None)


def trace_patches(states: WindowStates) -> list[Patch]:
    """The patch of vLLM's function of a window: it copies what each layer is given."""
    numbers = {id(layer.layer): number for number, layer in enumerate(states.layers)}

    def given(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, *_: Any) -> None:
        number = numbers.get(id(layer))
        if number is not None and states.stages_whole(metadata):
            states.trace.given(number, states, (mixed, a, b), metadata)

    return [noting(gdn_attention, SPEC_FORWARD, given)]


KERNELS = StateKernels(verify_window_reference, reference_commit, trace_patches)


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
        sizes = {"length": length, "requests": runner.max_num_reqs}
        return window_states(runner, layers, window, kernels=KERNELS, **sizes)

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
            if not states.stages(metadata, named.keys() - ARGUMENTS):
                return original(**named)
            mixed = torch.cat([named[part].flatten(1) for part in ("q", "k", "v")], dim=-1)
            out = torch.zeros_like(named["v"])
            states.verify(number, mixed, named["a"], named["b"], metadata, out)
            return out

        return update

    return Patch(_custom_ops, OPERATOR, wrap)
