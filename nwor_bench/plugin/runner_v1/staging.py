"""Staging and validation on a CPU: buffers of draft tokens' K/V, and which drafts were accepted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.plugin.late_counts import in_every_layer
from nwor_bench.plugin.layers import LayerCache, StagedLayers
from nwor_bench.plugin.runner_hook import ScvValidator
from nwor_bench.records.fallback_reasons import NO_CUDA
from nwor_bench.records.types import ScvMode
from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference
from nwor_kernels.metadata import ERROR_FLAG, error_names
from nwor_kernels.stage.reference import stage_kv_cache_reference


class StagingBuffers(StagedLayers):
    """Holds a window's K/V outside the cache.

    `grouped`: slots are [groups, N], and each layer has a row of them.
    """

    def __init__(self, layers: list[LayerCache], capacity: int, grouped: bool = False):
        super().__init__(layers, capacity)
        device = layers[0].kv_cache.device
        self._grouped = grouped
        self.metadata = torch.zeros(self.num_layers, 2, dtype=torch.int32, device=device)
        self.written = torch.zeros(self.num_layers, dtype=torch.int32, device=device)
        self.committed_tokens = 0
        """Drafts that the window's commit wrote in every layer, as it counted them."""
        self.key: list[Tensor] = []
        """By layer, [capacity, kv_heads, head_dim]."""
        self.value: list[Tensor] = []
        """By layer, [capacity, kv_heads, value_head_dim]."""
        for layer in self.layers:
            _, kv_heads, _, width = layer.kv_cache.shape
            rows = torch.empty(capacity, kv_heads, width, dtype=layer.dtype, device=device)
            self.key.append(rows[..., : layer.head_dim].contiguous())
            self.value.append(rows[..., layer.head_dim :].contiguous())

    def reset(self) -> None:
        """Forget the last window."""
        self.metadata.zero_()
        self.committed_tokens = 0

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        """Copy the rows into the layer's buffers; returns the error words, or ''."""
        staged = self.key[layer], self.value[layer]
        if (key.shape[1:], value.shape[1:]) != (staged[0].shape[1:], staged[1].shape[1:]):
            return "kv_shape"
        metadata = self.metadata[layer]
        stage_kv_cache_reference(key, value, rows, *staged, metadata)
        return error_names(int(metadata[ERROR_FLAG]))

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        """Write accepted rows to all layers; returns the error words, or ''.

        After an error other layers may have written: the window then falls back, and writes every
        row.
        """
        self.written.zero_()
        for number, layer in enumerate(self.layers):
            part = slice(number, number + 1)
            commit_windows_reference(
                ([self.key[number]], [self.value[number]]),
                LayerCaches([layer.kv_cache]),
                self._slots_of(layer, slots),
                accepted,
                self.metadata[part, ERROR_FLAG],
                layer_metadata=self.metadata[part],
                written=self.written[part],
            )
        self.committed_tokens = self._committed(slots, accepted)
        problems = 0
        for flags in self.metadata[:, ERROR_FLAG].tolist():
            problems |= flags
        return error_names(problems)

    def _slots_of(self, layer: LayerCache, slots: Tensor) -> Tensor:
        return slots[layer.slot_row] if self._grouped else slots

    def _committed(self, slots: Tensor, accepted: Tensor) -> int:
        """Drafts that were written; one without a slot cannot be, and is no fault."""
        due = int((accepted & (self._slots_of(self.layers[0], slots) >= 0)).sum())
        return int(accepted.sum()) - due + in_every_layer(self.written.tolist(), due)

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        """Write every staged row of these layers, as stock vLLM would have done at once."""
        for number in layers:
            layer = self.layers[number]
            of_layer = self._slots_of(layer, slots)
            staged = slice(0, of_layer.numel())
            rows = self.key[number][staged], self.value[number][staged]
            write_kv_cache(*rows, layer.kv_cache, of_layer)


def write_kv_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """Write each row with a slot >= 0 to the paged cache, in place.

    Args:
        key: [num_tokens, kv_heads, head_dim].
        value: [num_tokens, kv_heads, value_head_dim].
        kv_cache: [blocks, kv_heads, block_size, head_dim + value_head_dim].
        slots: [num_tokens] int64, block * block_size + offset; negative: not written.
    """
    rows = (slots >= 0).nonzero(as_tuple=True)[0]
    block_size = kv_cache.shape[2]
    block, offset = slots[rows] // block_size, slots[rows] % block_size
    both = torch.cat([key[rows], value[rows]], dim=-1)
    kv_cache[block, :, offset] = both.to(kv_cache.dtype)


class ValidationRefused(ValueError):
    """The sampled ids cannot be matched to the window; the message is the fallback reason."""


@dataclass(frozen=True)
class Validation:
    """A validated window."""

    accepted: Tensor
    """[N] bool, in the order of the window's drafts."""
    num_accepted: list[int]
    """Accepted drafts of each request of the batch."""
    fallback_reason: str | None
    """Why the host decided in a mode of the device."""


class Validator(ScvValidator):
    """Which of a window's drafts did the target accept?

    Every mode copies the sampled ids to the host and loops, the reference; `graph` and `adaptive`
    count why.
    """

    def __init__(self, capacity: int, vocab_size: int, device: torch.device):
        super().__init__()
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._device = device

    def validate(self, sampled_token_ids: Tensor, num_draft_tokens: tuple[int, ...]) -> Validation:
        """Decide which drafts were accepted.

        Args:
            sampled_token_ids: [requests, width] int, -1 padded, width <= drafts + 1.
            num_draft_tokens: drafts of each request, in the same order.

        Raises:
            ValidationRefused: ids of a shape or type that cannot belong to this window.
        """
        ids = sampled_token_ids
        if ids.dim() != 2 or ids.shape[0] != len(num_draft_tokens):
            raise ValidationRefused("sampled_ids_shape")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise ValidationRefused("sampled_ids_dtype")
        if sum(num_draft_tokens) > self._capacity:
            raise ValidationRefused("more_drafts_than_capacity")
        reason = None
        if self.mode is not ScvMode.OFF:
            reason = NO_CUDA if self._device.type != "cuda" else "capture_not_supported"
            self.count_fallback(reason)
        num_accepted = accepted_on_host(ids.tolist(), num_draft_tokens, self._vocab_size)
        mask = [
            draft < accepted
            for drafts, accepted in zip(num_draft_tokens, num_accepted, strict=True)
            for draft in range(drafts)
        ]
        accepted = torch.tensor(mask, dtype=torch.bool, device=self._device)
        return Validation(accepted, num_accepted, reason)


def accepted_on_host(
    sampled_token_ids: list[list[int]], num_draft_tokens: tuple[int, ...], vocab_size: int
) -> list[int]:
    """Accepted drafts of each request: valid ids less the one that is no draft.

    A row without a valid id (a chunked prefill) accepted nothing; no row accepts more than
    it has drafts.
    """
    accepted = []
    for ids, drafts in zip(sampled_token_ids, num_draft_tokens, strict=True):
        valid = sum(1 for token in ids if 0 <= token < vocab_size)
        accepted.append(min(max(valid - 1, 0), drafts))
    return accepted
