"""Staging on a GPU set up for one runner, or why its windows must be written directly."""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_v2.attention import BUILDERS, StagingAttention, why_unsupported
from nwor_bench.plugin.runner_v2.graph_sets import StagingGraphs
from nwor_bench.plugin.runner_v2.persisting_l2 import PersistingL2
from nwor_bench.plugin.runner_v2.plan import WindowPlanner
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.staging import refusals
from nwor_bench.plugin.staging.layers import LayerCache, StagingUnavailable, one_group_of
from nwor_bench.plugin.staging.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.types import StageBy, StageL2
from nwor_kernels.verify_attention.kernel import VerifyWorkspace

logger = logging.getLogger("vllm.nwor_bench")

REFERENCED_PART = 64
"""By reference a window may keep 1/64 of the device's memory alive: 1.25 GB of 80.

vLLM has not seen it in its memory profile, and leaves about 8 % free by default. A step of 320
rows (64 requests with 4 drafts) of Llama-3.1-8B holds 126 MB.
"""


@dataclass(frozen=True)
class StagingParts:
    """Staging for one runner."""

    window: Window
    staging: GpuStaging
    graphs: StagingGraphs
    """Full CUDA graphs of mode `stage`."""
    planner: WindowPlanner
    """Plans windows of mode `stage`."""
    attention: PatchSet
    """Applied in modes `stage` and `control`."""
    control_graphs: StagingGraphs
    """Full CUDA graphs of mode `control`."""
    control_planner: WindowPlanner
    """Plans windows of mode `control`."""


def set_up_staging(
    runner: Any, target_names: list[str], settings: PluginSettings
) -> tuple[StagingParts | None, str | None]:
    """Everything that staging needs from vLLM's V2 runner, or None and the fallback reason.

    An error in this code is a fallback reason too: it stops neither mode off nor vLLM's start.
    """
    try:
        return _parts(runner, target_names, settings), None
    except StagingUnavailable as unavailable:
        return None, str(unavailable)
    except Exception as fault:
        logger.exception("nwor: staging could not be set up; windows are written directly")
        return None, f"setup:{type(fault).__name__}"


def _parts(runner: Any, target_names: list[str], settings: PluginSettings) -> StagingParts:
    reason = why_runner_cannot_stage(runner)
    length = runner.num_speculative_steps + 1
    context = runner.compilation_config.static_forward_context
    for name in target_names:
        reason = reason or why_unsupported(context[name], length, runner.dtype)
    reason = reason or refusals.of_groups(
        getattr(runner, "attn_groups", ()), target_names, BUILDERS
    )
    if reason:
        raise StagingUnavailable(reason)
    group = one_group_of(runner, target_names)
    caches, scales = target_caches(runner, target_names)
    staging = GpuStaging(caches, runner.max_num_reqs * (length - 1), scales)
    copied = settings.stage_by is StageBy.COPY
    if settings.stage_l2 is StageL2.PERSIST:
        staging.l2 = PersistingL2(staging.buffers.memory)
    window = Window(staging)
    layers = [context[name] for name in target_names]
    most = most_referenced_rows(layers, runner.dtype.itemsize, _memory_of(runner.device))

    def planned(control: bool) -> tuple[StagingGraphs, WindowPlanner]:
        graphs = StagingGraphs(runner, window, staging, copied, control)
        return graphs, WindowPlanner(
            length, group, runner.max_num_reqs, graphs, runner.device, copied, most_referenced=most
        )

    attention = _attention_patches(runner, layers, length, window, staging)
    return StagingParts(window, staging, *planned(False), attention, *planned(True))


def _attention_patches(
    runner: Any, layers: list[Any], length: int, window: Window, staging: GpuStaging
) -> PatchSet:
    impl = layers[0].impl
    workspace = VerifyWorkspace.create(
        max_requests=runner.max_num_reqs,
        num_heads=impl.num_heads,
        num_kv_heads=impl.num_kv_heads,
        head_dim=impl.head_size,
        max_query_len=length,
        device=runner.device,
    )
    patches: list[Patch] = []
    for number, layer in enumerate(layers):
        patches += StagingAttention(number, layer, window, staging, workspace).patches()
    return PatchSet(patches)


def _memory_of(device: torch.device) -> int | None:
    """All of a CUDA device's memory in bytes; None for a CPU, where it sets no limit."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def most_referenced_rows(layers: list[Any], itemsize: int, memory_bytes: int | None) -> int | None:
    """Most rows of a step that may stay alive by reference in every layer.

    A row's K and V are views into the layer's fused QKV, all of which they keep alive.

    Args:
        layers: vLLM's attention layers of the target, on this rank.
        itemsize: bytes of an activation.
        memory_bytes: the device's memory; None: any number of rows.
    """
    if memory_bytes is None:
        return None
    row = sum(
        (layer.impl.num_heads + 2 * layer.impl.num_kv_heads) * layer.impl.head_size
        for layer in layers
    )
    return memory_bytes // REFERENCED_PART // (row * itemsize)


def why_runner_cannot_stage(runner: Any) -> str | None:
    """The fallback reason of a runner whose steps this hook cannot follow, or None."""
    config = runner.vllm_config
    parts = {
        "data_parallel": runner.parallel_config.data_parallel_size > 1,
        reasons.PIPELINE_PARALLEL: runner.use_pp,
        "context_parallel": runner.dcp_size > 1 or runner.pcp_manager is not None,
        "kv_transfer": config.kv_transfer_config is not None,  # reads the cache within a step
        "adaptive_verification": runner.adaptive_verification is not None,
        "micro_batches": runner.ubatch_runner is not None,
        "lora": runner.lora_config is not None,
    }
    reason = next((reason for reason, holds in parts.items() if holds), None)
    reason = reason or refusals.of_model(getattr(config, "model_config", None))
    return reason or refusals.of_compilation(runner.compilation_config, runner.cudagraph_manager)


def target_caches(
    runner: Any, target_names: list[str]
) -> tuple[list[LayerCache], tuple[list[Tensor], list[Tensor]] | None]:
    """The target's caches on a GPU, and the K and V scales of each if they are fp8."""
    context = runner.compilation_config.static_forward_context
    layers = [context[name] for name in target_names]
    caches = [
        LayerCache(name, layer.kv_cache, layer.head_size, runner.dtype)
        for name, layer in zip(target_names, layers, strict=True)
    ]
    if not any(layer.impl.kv_cache_dtype.startswith("fp8") for layer in layers):
        return caches, None
    keys = [layer._k_scale.view(-1) for layer in layers]
    values = [layer._v_scale.view(-1) for layer in layers]
    return caches, (keys, values)
