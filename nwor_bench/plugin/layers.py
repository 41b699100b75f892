"""Which attention layers belong to the target, and can they be staged?

Names alone do not tell: an EAGLE head on a 30-layer target registers as layer 30 of the
same model, in the same KV-cache group. So the runner is asked what it registered after both
models were loaded.
"""

from typing import Any

from nwor_bench.plugin.attention import ReferenceCPUAttentionImpl
from nwor_bench.plugin.staging import LayerCache, StagingUnavailable


def attention_layers(runner: Any) -> tuple[list[str], list[str]]:
    """Names of (target, drafter) layers that have a KV cache, each in the runner's order."""
    drafter = getattr(runner, "drafter", None)
    draft_names = set(getattr(drafter, "_draft_attn_layer_names", None) or ())
    names = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    target = [name for name in names if name not in draft_names]
    return target, [name for name in names if name in draft_names]


def stageable_layers(runner: Any, target_names: list[str]) -> list[LayerCache]:
    """The target's layers as the staging buffers need them.

    Raises:
        StagingUnavailable: with the fallback reason, where windows must be written directly.
    """
    groups = runner.kv_cache_config.kv_cache_groups
    if sum(1 for g in groups if set(g.layer_names) & set(target_names)) > 1:
        raise StagingUnavailable("several_kv_cache_groups")
    context = runner.compilation_config.static_forward_context
    sharing = [
        layer
        for layer in context.values()
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None
    ]
    if sharing:
        raise StagingUnavailable("layers_share_kv")
    return [_layer_cache(name, context[name], runner.dtype) for name in target_names]


def _layer_cache(name: str, layer: Any, dtype: Any) -> LayerCache:
    if not isinstance(layer.impl, ReferenceCPUAttentionImpl):
        raise StagingUnavailable(f"unsupported_attention:{type(layer.impl).__name__}")
    return LayerCache(name, layer.kv_cache, layer.head_size, dtype)
