"""Staging on a CPU set up for one runner, or why its windows must be written directly."""

import logging
from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl
from nwor_bench.plugin.runner_v1.staging import StagingBuffers
from nwor_bench.plugin.staging import refusals
from nwor_bench.plugin.staging.layers import LayerCache, StagingUnavailable, one_group_of
from nwor_bench.records import fallback_reasons as reasons

logger = logging.getLogger("vllm.nwor_bench")


def set_up_staging(
    runner: Any, target_names: list[str], capacity: int
) -> tuple[StagingBuffers | None, str | None]:
    """Staging buffers for vLLM's V1 runner, or None and the fallback reason.

    An error in this code is a fallback reason too: it stops neither mode off nor vLLM's start.
    """
    try:
        return StagingBuffers(stageable_layers(runner, target_names), capacity), None
    except StagingUnavailable as unavailable:
        return None, str(unavailable)
    except Exception as fault:
        logger.exception("nwor: staging could not be set up; windows are written directly")
        return None, f"setup:{type(fault).__name__}"


def stageable_layers(runner: Any, target_names: list[str]) -> list[LayerCache]:
    """The target's layers and their caches, for the staging buffers.

    Raises StagingUnavailable with the fallback reason, where windows must be written directly.
    """
    if runner.parallel_config.pipeline_parallel_size > 1:
        raise StagingUnavailable(reasons.PIPELINE_PARALLEL)  # only the last stage samples
    context = runner.compilation_config.static_forward_context
    for name in target_names:
        reason = refusals.of_kind(context[name])
        if reason is not None:
            raise StagingUnavailable(reason)
    one_group_of(runner, target_names)
    return [_layer_cache(name, context[name], runner.dtype) for name in target_names]


def _layer_cache(name: str, layer: Any, dtype: Any) -> LayerCache:
    if not isinstance(layer.impl, ReferenceCPUAttentionImpl):
        raise StagingUnavailable(reasons.unsupported_attention(type(layer.impl).__name__))
    if layer.impl.why_stock is not None:
        raise StagingUnavailable(layer.impl.why_stock)
    reason = refusals.of_layer(layer, (CPUAttentionMetadataBuilder,))
    if reason is not None:
        raise StagingUnavailable(reason)
    return LayerCache(name, layer.kv_cache, layer.head_size, dtype)
