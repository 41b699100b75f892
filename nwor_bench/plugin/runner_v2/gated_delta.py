"""Gated delta nets on a GPU: two methods of each layer, wrapped in modes `stage` and `control`.

vLLM calls them inside an opaque operator, so that they run between compiled parts. Qwen3-Next's
`_forward_core` convolves and recurs; Qwen3.5's fused kernel, for windows of up to 8 tokens, comes
behind its convolution and has the gated norm in it.
"""

import logging
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.layers import StagingUnavailable, TargetLayers, set_up
from nwor_bench.plugin.one_slot_states import window_states
from nwor_bench.plugin.patching import Patch, noting
from nwor_bench.plugin.runner_v2.plan import REFERENCED_PART
from nwor_bench.plugin.state_layers import StateLayer, find_states, shape_of, token_bytes
from nwor_bench.plugin.states import StateKernels, WindowStates
from nwor_bench.plugin.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.state_slots import one_slot
from nwor_kernels.gated_delta.launch import StateCommit, refusal, verify_window_triton
from nwor_kernels.gated_delta.records import GatedNorm
from nwor_kernels.limits import RECORD_ROWS

logger = logging.getLogger("vllm.nwor_bench")

RINGS_PART = 16
"""Rings may take this part of the memory: a seventh of the states of as many requests (27B)."""

KERNEL = "fused_sigmoid_gating_delta_rule_update"
"""Stock's kernel of windows, as the layers' module has imported it."""


def set_up_states(
    runner: Any, target: TargetLayers, window: Window, memory_bytes: int | None
) -> tuple[WindowStates | None, str | None]:
    """The states of vLLM's V2 runner, or why stock writes them; (None, None) without such layers.

    Their records may take as much memory as K/V that are held by reference (REFERENCED_PART).

    Args:
        memory_bytes: the device's memory; None: any number of requests has records.
    """
    if not target.recurrent:
        return None, None
    length = runner.num_speculative_steps + 1

    def make() -> WindowStates:
        if (reason := lost(Feature.STATES)) is not None:
            raise StagingUnavailable(reason)
        layers = find_states(runner, target, lambda states: states)
        _check(layers[0], length, runner)
        requests = runner.max_num_reqs
        if memory_bytes is not None:
            rings = one_slot(runner.vllm_config.additional_config)
            rows, part = (RECORD_ROWS, RINGS_PART) if rings else (length, REFERENCED_PART)
            one = rows * token_bytes(layers, runner.dtype)
            requests = min(requests, memory_bytes // part // one)
        sizes = {"length": length, "requests": requests}
        return window_states(runner, layers, window, kernels=KERNELS, **sizes)

    return set_up(make)


def _check(layer: StateLayer, length: int, runner: Any) -> None:
    problem = refusal(
        **shape_of(layer), window=length, dtype=runner.dtype, state_dtype=layer.state.dtype
    )
    if problem is not None:
        logger.warning("nwor: recurrent states are left to stock vLLM: %s", problem)
        raise StagingUnavailable(reasons.unsupported_states("shape"))


def trace_patches(states: WindowStates) -> list[Patch]:
    """The patches of the methods that convolve: they copy what each layer is given."""

    def patch_of(number: int, name: str) -> Patch:
        layer = states.layers[number]

        def given(mixed_qkv: Tensor, b: Tensor, a: Tensor, **more: Any) -> None:
            step = get_forward_context().attn_metadata
            metadata = step.get(layer.layer.prefix) if isinstance(step, dict) else None
            if metadata is not None and states.stages_whole(metadata):
                inputs = mixed_qkv, a, b
                states.trace.given(number, states, inputs, metadata, more.get("output_gate"))

        return noting(layer.layer, name, given)

    names = ("_forward_core", "_forward_core_decode_spec_fused_norm")
    return [patch_of(number, name) for number in range(len(states.layers)) for name in names]


KERNELS = StateKernels(verify_window_triton, StateCommit, trace_patches)


def state_patches(states: WindowStates) -> list[Patch]:
    """The patches of all layers; not yet applied."""
    nets = [StagedDeltaNet(number, states) for number in range(len(states.layers))]
    patches = [patch for net in nets for patch in net.patches()]
    return [*patches, _kernel_patch(states)] if states.rings else patches


def _kernel_patch(states: WindowStates) -> Patch:
    """The patch of stock's kernel in steps with a prefill: there `_forward_core` calls it for the
    windows' rows, behind their convolution."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

    numbers = {id(layer.layer.A_log): number for number, layer in enumerate(states.layers)}
    known = ref(states)  # vLLM's module outlives the engine

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(**named: Any) -> Any:
            states, number = known(), numbers.get(id(named["A_log"]))
            if states is None or number is None or named.get("num_accepted_tokens") is None:
                return original(**named)  # rows without drafts
            layer = states.layers[number].layer
            metadata = get_forward_context().attn_metadata[layer.prefix]
            if not states.stages(metadata):
                return original(**named)
            mixed = torch.cat([named[part].squeeze(0).flatten(1) for part in "qkv"], dim=-1)
            out = torch.empty_like(named["v"])
            states.verify(number, mixed, named["a"], named["b"], metadata, out.squeeze(0))
            return out, None

        return update

    return Patch(stock, KERNEL, wrap)


class StagedDeltaNet:
    """One gated delta net.

    Args:
        number: its place among `states.layers`.
    """

    def __init__(self, number: int, states: WindowStates):
        self._number, self._states = number, states
        self._layer = states.layers[number].layer

    def patches(self) -> list[Patch]:
        """The patches of its methods; not yet applied."""
        layer, behind = self._layer, "_forward_core_decode_spec_post_conv_fused_norm"
        core = Patch(layer, "_forward_core", self._wrap_core)
        return [core, Patch(layer, behind, self._wrap_behind_convolution)]

    def _wrap_core(self, original: Callable[..., None]) -> Callable[..., None]:
        def forward_core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
            step = get_forward_context().attn_metadata
            metadata = step.get(self._layer.prefix) if isinstance(step, dict) else None
            # Beside a prefill `_kernel_patch` stages the windows, with one state slot a request.
            if metadata is None or not self._states.stages_whole(metadata):
                original(mixed_qkv=mixed_qkv, b=b, a=a, core_attn_out=core_attn_out)
                return
            tokens = slice(metadata.num_actual_tokens)
            mixed = self._convolved(mixed_qkv[tokens], metadata)
            out = core_attn_out[tokens]
            self._states.verify(self._number, mixed, a[tokens], b[tokens], metadata, out)

        return forward_core

    def _convolved(self, mixed: Tensor, metadata: Any) -> Tensor:
        """The window behind its convolution, whose inputs vLLM's kernel keeps: its own call."""
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as stock

        layer, indices = self._layer, metadata.spec_state_indices_tensor
        kept, weight = layer.kv_cache[0], layer.conv1d.weight
        convolved: Tensor = stock.causal_conv1d_update(
            mixed,
            kept if stock.is_conv_state_dim_first() else kept.transpose(-1, -2),
            weight.view(weight.size(0), weight.size(2)),
            layer.conv1d.bias,
            layer.activation,
            conv_state_indices=indices[:, 0][: metadata.num_spec_decodes],
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=metadata.spec_query_start_loc,
            max_query_len=indices.size(-1),
            validate_data=False,
        )
        return convolved

    def _wrap_behind_convolution(self, original: Callable[..., None]) -> Callable[..., None]:
        def post_conv_fused_norm(
            mixed_qkv: Tensor,
            b: Tensor,
            a: Tensor,
            output_gate: Tensor,
            core_attn_out: Tensor,
            attn_metadata: Any,
        ) -> None:
            states, layer = self._states, self._layer
            if states.stages(attn_metadata):
                norm = layer.norm
                gated = GatedNorm(
                    output_gate, norm.weight, layer.layer_norm_epsilon, norm.activation
                )
                states.verify(self._number, mixed_qkv, a, b, attn_metadata, core_attn_out, gated)
                return
            original(
                mixed_qkv=mixed_qkv,
                b=b,
                a=a,
                output_gate=output_gate,
                core_attn_out=core_attn_out,
                attn_metadata=attn_metadata,
            )

        return post_conv_fused_norm
