"""What every latent (MLA) layer does on a GPU while NWOR stages, whatever attends.

A cached row is a latent and a rotary part, without heads: they are staged as K and V of one head.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.runner_v2.step_inputs import StepInputs
from nwor_bench.plugin.staging import refusals
from nwor_bench.plugin.staging.window import Window


class LatentLayer:
    """One latent target layer.

    Args:
        number: the layer's number among the target layers.
        layer: vLLM's `MLAAttention`.
        window: the window in flight.
        staging: holds the window's rows.
        inputs: what its attention reads of the step besides them.
        table: number of the layer's block table among the inputs.
    """

    def __init__(
        self,
        number: int,
        layer: Any,
        window: Window,
        staging: GpuStaging,
        inputs: StepInputs,
        table: int,
    ):
        self._number = number
        self._layer = layer
        self._window = window
        self._set, self._place = staging.place(number)
        self._slot_row = staging.layers[number].slot_row
        self._inputs = inputs
        self._table = table
        self._scale = float(layer.impl.scale)

    def slots_to_write(self, latent: Tensor, key_pe: Tensor, slots: Tensor) -> Tensor | None:
        """Stage the step's rows where a window asks for it; what of them is to be written at once.

        Args:
            latent: [rows, latent] as it would be written.
            key_pe: [rows, 1, rotary part] likewise.
            slots: [rows] int64, stock's slots of the layer.

        Returns:
            Slots for the stock write, -1 for staged rows; None: nothing is written.
        """
        window = self._window
        staged = window.is_staging and window.stage(self._number, latent.unsqueeze(1), key_pe)
        if not staged or window.is_control:
            return slots
        batch = window.batch
        assert isinstance(batch, GpuWindowBatch)
        return None if batch.direct_slots is None else batch.direct_slots_of[self._slot_row]

    def _wrap_prefill(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Prefills read the cache too, of requests without a window: `_guard` sees to that."""

        def forward_mha(
            query: Tensor,
            latent: Tensor,
            key_pe: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            self._guard(attn_metadata)
            return original(query, latent, key_pe, kv_cache, attn_metadata, *args, **kwargs)

        return forward_mha

    def _guard(self, metadata: Any) -> GpuWindowBatch | None:
        """The window if this layer's attention is to read it; aborted if the step does not fit."""
        window = self._window
        if not window.is_staging:
            return None
        batch = window.batch
        assert isinstance(batch, GpuWindowBatch)
        reason = None if window.has_staged(self._number) else refusals.NOT_STAGED
        reason = reason or refusals.of_latent_step(metadata, batch.num_draft_tokens)
        if reason is None:
            return batch
        window.abort(reason)  # before the cache is read for this layer
        return None
