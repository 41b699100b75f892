"""Which attention layers belong to the target, and can they be staged?

Names alone do not tell: an EAGLE head on a 30-layer target registers as layer 30 of the
same model, in the same KV-cache group. So the runner is asked what it registered after both
models were loaded.
"""

from typing import Any

from torch import Tensor

from nwor_bench.plugin import refusals
from nwor_bench.plugin.staging import LayerCache, StagingUnavailable


def attention_layers(runner: Any) -> tuple[list[str], list[str]]:
    """Names of (target, drafter) layers that have a KV cache, each in the runner's order.

    V1 keeps the drafter's names in `drafter`, V2 in `speculator`; prompt lookup has none.
    """
    drafter = getattr(runner, "drafter", None)
    speculator = getattr(runner, "speculator", None)
    draft_names = set(getattr(drafter, "_draft_attn_layer_names", None) or ())
    draft_names |= set(getattr(speculator, "draft_attn_layer_names", None) or ())
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    target = [name for name in names if name not in draft_names]
    return target, [name for name in names if name in draft_names]


def one_group_of(runner: Any, target_names: list[str]) -> int:
    """Number of the KV-cache group that holds the target's layers.

    Raises:
        StagingUnavailable: with the fallback reason, where windows must be written directly:
            layers in several groups, or layers that share another layer's K/V.
    """
    groups = runner.kv_cache_config.kv_cache_groups
    holding = [n for n, g in enumerate(groups) if set(g.layer_names) & set(target_names)]
    if len(holding) > 1:
        raise StagingUnavailable("several_kv_cache_groups")
    if not holding:
        raise StagingUnavailable("no_target_layers")
    context = runner.compilation_config.static_forward_context
    for layer in context.values():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise StagingUnavailable("layers_share_kv")
    return holding[0]


def stageable_layers(runner: Any, target_names: list[str]) -> list[LayerCache]:
    """The target's layers as the CPU's staging buffers need them.

    Raises StagingUnavailable with the fallback reason, where windows must be written directly.
    """
    if runner.parallel_config.pipeline_parallel_size > 1:
        raise StagingUnavailable("pipeline_parallel")  # only the last stage samples
    context = runner.compilation_config.static_forward_context
    for name in target_names:
        reason = refusals.of_kind(context[name])
        if reason is not None:
            raise StagingUnavailable(reason)
    one_group_of(runner, target_names)
    return [_layer_cache(name, context[name], runner.dtype) for name in target_names]


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


def _layer_cache(name: str, layer: Any, dtype: Any) -> LayerCache:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

    if not isinstance(layer.impl, ReferenceCPUAttentionImpl):
        raise StagingUnavailable(f"unsupported_attention:{type(layer.impl).__name__}")
    if layer.impl.why_stock is not None:
        raise StagingUnavailable(layer.impl.why_stock)
    reason = refusals.of_layer(layer, (CPUAttentionMetadataBuilder,))
    if reason is not None:
        raise StagingUnavailable(reason)
    return LayerCache(name, layer.kv_cache, layer.head_size, dtype)
