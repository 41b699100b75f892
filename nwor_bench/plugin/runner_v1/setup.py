"""Staging on a CPU set up for one runner, or why its windows must be written directly."""

import logging
from typing import Any

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl
from nwor_bench.plugin.runner_v1.mla_attention import StagingCPUMLAImpl
from nwor_bench.plugin.runner_v1.staging import StagingBuffers
from nwor_bench.plugin.staging import refusals
from nwor_bench.plugin.staging.layers import (
    LayerCache,
    SlotRows,
    StagingUnavailable,
    TargetLayers,
    is_latent,
    rows_of,
    slot_rows,
)
from nwor_bench.records import fallback_reasons as reasons

logger = logging.getLogger("vllm.nwor_bench")

BUILDERS = (CPUAttentionMetadataBuilder, MLACommonMetadataBuilder)
"""Builders whose metadata describe the step's requests."""


def set_up_staging(
    runner: Any, target: TargetLayers, capacity: int
) -> tuple[StagingBuffers | None, str | None]:
    """Staging buffers for vLLM's V1 runner, or None and the fallback reason.

    An error in this code is a fallback reason too: it stops neither mode off nor vLLM's start.
    """
    try:
        layers, slots = stageable_layers(runner, target)
        return StagingBuffers(layers, capacity, grouped=slots.several), None
    except StagingUnavailable as unavailable:
        return None, str(unavailable)
    except Exception as fault:
        logger.exception("nwor: staging could not be set up; windows are written directly")
        return None, f"setup:{type(fault).__name__}"


def stageable_layers(runner: Any, target: TargetLayers) -> tuple[list[LayerCache], SlotRows]:
    """The target's layers with their caches, and where they find their slots.

    Raises StagingUnavailable with the fallback reason, where windows must be written directly.
    """
    if runner.device.type != "cpu":
        raise StagingUnavailable(reasons.V1_RUNNER_ON_GPU)
    if runner.parallel_config.pipeline_parallel_size > 1:
        raise StagingUnavailable(reasons.PIPELINE_PARALLEL)  # only the last stage samples
    engine = refusals.of_engine(runner.vllm_config)
    if engine is not None:
        raise StagingUnavailable(engine)
    if target.recurrent and not target.staged:
        raise StagingUnavailable(reasons.RECURRENT_LAYERS)
    context = runner.compilation_config.static_forward_context
    theirs = [context[name] for name in (*target.staged, *target.sharing, *target.indexers)]
    for why in (refusals.of_kind, _why_unsupported):
        reason = next((found for layer in theirs if (found := why(layer)) is not None), None)
        if reason is not None:
            raise StagingUnavailable(reason)
    if any(map(is_latent, theirs)) and runner.use_async_scheduling:
        # Windows are prefills there, and the host's lengths of their contexts are guesses.
        raise StagingUnavailable("latent_attention_async_scheduling")
    slots = slot_rows(runner, target.staged)
    layers = [
        LayerCache(name, *rows_of(context[name]), runner.dtype, row)
        for name, row in zip(target.staged, slots.of_layer, strict=True)
    ]
    return layers, slots


def _why_unsupported(layer: Any) -> str | None:
    if not isinstance(layer.impl, (ReferenceCPUAttentionImpl, StagingCPUMLAImpl)):
        return reasons.unsupported_attention(type(layer.impl).__name__)
    return layer.impl.why_stock or refusals.of_layer(layer, BUILDERS)
