"""The part that all target layers on a GPU share while NWOR stages."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor_bench.plugin.observe.layer_trace import LayerTrace
from nwor_bench.plugin.runner_v2.batch import GpuWindowBatch
from nwor_bench.plugin.runner_v2.staging import GpuStaging
from nwor_bench.plugin.runner_v2.step_inputs import StepInputs
from nwor_bench.plugin.staging.refusals import causal_implementation
from nwor_bench.plugin.staging.window import Window


class StagedLayer:
    """One target layer.

    Args:
        number: number of the layer whose K/V it reads, which is its own unless it shares them.
        layer: vLLM's attention module.
        window: the window in flight.
        staging: holds the window's K/V.
        inputs: of its attention, besides K/V.
        table: number of the layer's block table among them.
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
        self._staging = staging
        self._causal = causal_implementation(layer.impl)
        self._stock_write: Callable[..., Any] | None = None
        self._stock_attention: Callable[..., Any] | None = None
        self._scale = float(self._causal.scale)

    @property
    def trace(self) -> LayerTrace | None:
        """Records this window's inputs and outputs, if it is checked."""
        return self._staging.trace

    @property
    def name(self) -> str:
        """vLLM's name of it."""
        return str(self._layer.layer_name)

    @property
    def owner(self) -> str:
        """Name of the layer whose K/V it reads; its own, unless it shares them."""
        return self._staging.layers[self._number].name

    def cache_rows(self) -> Tensor:
        """[blocks, kv_heads, block_size, K + V width], the cache that it reads."""
        return self._staging.layers[self._number].kv_cache

    def slots_to_write(self, key: Tensor, value: Tensor, slots: Tensor) -> Tensor | None:
        """Stage the step's rows if a window asks for it; the slots that are to be written at once.

        Args:
            key, value: [rows, heads, width] as they would be written; latents as K and V of one
                head.
            slots: [rows] int64, stock's slots of the layer.

        Returns:
            Slots for the stock write, -1 for staged rows; None: nothing is written.
        """
        window = self._window
        staged = window.is_staging and window.stage(self._number, key, value)
        if staged and self.trace is not None:
            self.trace.wrote(self.name, key, value)
        if not staged or window.is_control:
            return slots
        batch = window.batch
        assert isinstance(batch, GpuWindowBatch)
        return None if batch.direct_slots is None else batch.direct_slots_of[self._slot_row]
