"""Which attention layers belong to the target, and their caches.

Names alone do not show it: an EAGLE head on a 30-layer target registers as layer 30 of the
same model, in the same KV-cache group. So the runner is asked what it registered after both
models were loaded.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.errors import BenchError
from nwor_bench.records import fallback_reasons as reasons


class StagingUnavailable(BenchError):
    """This model's layers cannot be staged; the message is the fallback reason."""


@dataclass(frozen=True)
class LayerCache:
    """One target layer's cache: `kv_cache` is [blocks, kv_heads, block_size, K + V width]."""

    name: str
    kv_cache: Tensor
    head_dim: int
    dtype: torch.dtype


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
        raise StagingUnavailable(reasons.SEVERAL_KV_CACHE_GROUPS)
    if not holding:
        raise StagingUnavailable("no_target_layers")
    context = runner.compilation_config.static_forward_context
    for layer in context.values():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise StagingUnavailable(reasons.LAYERS_SHARE_KV)
    return holding[0]
