"""One state slot a request (`records/state_slots.py`): what vLLM reserves, and the tables of slots.

Two patches, both called as an engine starts and passing through without the switch. The KV-cache
spec of a gated delta net asks for no block for drafts. vLLM's metadata then have one column of
slots; they get k + 1 equal ones, so every reader of "the state behind token t" reads the one slot:
vLLM's convolution, which takes the window's length from the columns, and our verify and commit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.settings import ATTENTION, read_settings
from nwor_bench.plugin.state_layers import strange_spec
from nwor_bench.records.state_slots import FIELD, check_one_slot, one_slot
from nwor_bench.records.types import AttentionBy


def slot_patches() -> list[Patch]:
    """The patches; not yet applied. None without what they need: `require_one_slot` refuses it."""
    if lost(Feature.SLOTS) is not None:
        return []
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

    return [
        Patch(MambaBase, "get_kv_cache_spec", _without_drafts),
        Patch(GDNAttentionMetadataBuilder, "__init__", _with_equal_columns),
    ]


def _without_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_spec(layer: Any, vllm_config: Any) -> Any:
        spec = original(layer, vllm_config)
        if not one_slot(vllm_config.additional_config):
            return spec
        _check(vllm_config, layer, spec)
        return replace(spec, num_speculative_blocks=0)

    return get_kv_cache_spec


def _check(vllm_config: Any, layer: Any, spec: Any) -> None:
    """Refuse configurations and layers whose windows cannot all be staged. Raises ConfigError."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn  # slow to import

    settings = read_settings()
    check_one_slot(vllm_config, "" if settings is None else settings.mode_name)
    assert settings is not None
    if settings.attention is AttentionBy.STOCK:
        remedy = "it leaves windows to stock vLLM, which writes k + 1 states; leave it out"
        raise ConfigError.for_field(ATTENTION, str(settings.attention), remedy)
    if type(layer) is not qwen_gdn_linear_attn.QwenGatedDeltaNetAttention:
        kind = type(layer).__name__
        remedy = f"only states of gated delta nets are staged, not those of {kind}; leave it out"
        raise ConfigError.for_field(FIELD, 1, remedy)
    if (strange := strange_spec(spec, vllm_config.num_speculative_tokens)) is not None:
        remedy = f"vLLM keeps states here in a way that is not staged ({strange}); leave it out"
        raise ConfigError.for_field(FIELD, 1, remedy)


def _with_equal_columns(original: Callable[..., None]) -> Callable[..., None]:
    def initialise(builder: Any, *given: Any, **named: Any) -> None:
        original(builder, *given, **named)
        if one_slot(builder.vllm_config.additional_config) and builder.num_spec:
            wrap = EqualColumns(builder).wrap
            PatchSet(Patch(builder, name, wrap) for name in ("build", "update_block_table")).apply()

    return initialise


class EqualColumns:
    """The slots of a builder's windows with k + 1 equal columns, at the same address in every step:
    a commit is made once for an address. Full graphs have buffers of vLLM's, which it fills so."""

    def __init__(self, builder: Any):
        requests = builder.vllm_config.scheduler_config.max_num_seqs
        self._table = torch.zeros(
            requests, builder.num_spec + 1, dtype=torch.int32, device=builder.device
        )

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that returns metadata."""

        def with_equal_columns(*given: Any, **named: Any) -> Any:
            metadata = original(*given, **named)
            slots = metadata.spec_state_indices_tensor
            if slots is None or slots.shape[1] == self._table.shape[1]:
                return metadata
            table = self._table[: len(slots)]
            table.copy_(slots, non_blocking=True)
            return replace(metadata, spec_state_indices_tensor=table)

        return with_equal_columns


def require_one_slot(worker: Any, hook: Any, not_attached: str | None) -> None:
    """Raise ConfigError if the engine has one slot and its windows could not all be staged.

    Args:
        hook: the worker's; None if it has none, because of `not_attached`.
    """
    if not one_slot(getattr(worker.vllm_config, "additional_config", None)):
        return
    reason = not_attached if hook is None else hook.why_not_one_slot()
    reason = lost(Feature.SLOTS) or reason
    if hook is None or reason is not None:
        remedy = f"windows cannot all be staged here ({reason or 'no hook'}); leave it out"
        raise ConfigError.for_field(FIELD, 1, remedy)
