"""Staged states of an engine with one slot a request (`state_slots`): every window with drafts is
staged, whatever becomes of its K/V and whatever runs beside it, or the step dies.

Committed records stay in rings (`state_rings`), and a commit writes the states of those that are
full. Rows without drafts are stock's; their states are made current first.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.errors import EngineError
from nwor_bench.plugin.state_layers import StateLayer
from nwor_bench.plugin.state_rings import StateRings
from nwor_bench.plugin.states import StateOutcome, StateTables, WindowStates, strange_call
from nwor_bench.plugin.window import Window
from nwor_bench.records import fallback_reasons as reasons
from nwor_bench.records.state_slots import one_slot
from nwor_kernels.gated_delta.reference import state_behind
from nwor_kernels.limits import RECORD_ROWS

ONE_SLOT = "an engine with one state slot a request"
"""What an error of such an engine is about."""


def window_states(
    runner: Any, layers: Sequence[StateLayer], window: Window, **sizes: Any
) -> WindowStates:
    """The states of a worker of vLLM's; `sizes` are further arguments of `WindowStates`."""
    sizes["dtype"] = runner.dtype
    if not one_slot(runner.vllm_config.additional_config):
        return WindowStates(layers, window, **sizes)
    rings = StateRings(runner.max_num_reqs, sizes["length"], runner.device)
    return OneSlotStates(layers, window, rings, **sizes)


class OneSlotStates(WindowStates):
    """`WindowStates` with one slot and one ring a request."""

    rings: StateRings
    bytes_per_request = None  # the device decides which states a commit writes
    _writes = (False,)

    def __init__(
        self, layers: Sequence[StateLayer], window: Window, rings: StateRings, **sizes: Any
    ):
        super().__init__(layers, window, **sizes)
        self.rings = rings
        self._sizes = len(layers), self.requests + 1, RECORD_ROWS  # ring 0 is nobody's
        self._options = {"rings": rings.records}
        self._room = (self._length,)  # rows that the next window needs

    def stages(self, metadata: Any, unknown: Collection[str] = ()) -> bool:
        """False if every row is without drafts: stock writes one state for each.

        Raises EngineError if stock would read a state behind live rows, or a window cannot be
        staged.
        """
        no_window = metadata.spec_sequence_masks is None
        if no_window or metadata.num_spec_decode_tokens == metadata.num_spec_decodes:
            if self.rings.in_use:
                raise EngineError.at(ONE_SLOT, "stock would read states behind rings' live rows")
            return False
        strange = strange_call(metadata, unknown)
        if strange or self._records is None or metadata.num_spec_decodes > self.requests:
            reason = strange or self.unavailable or reasons.STATES_OF_TOO_MANY
            raise EngineError.at(ONE_SLOT, f"a window cannot be staged ({reason})", reason)
        return True

    def _find_windows(self, metadata: Any) -> None:
        # Without the host's masks (vLLM 0.31) the commit waits for the device.
        masks = getattr(metadata, "spec_sequence_masks_cpu", metadata.spec_sequence_masks)
        beside_prefill = metadata.num_prefills > 0
        if beside_prefill and self._windows is None:
            self.rings.only(masks)
        self._windows = masks if beside_prefill else None

    def current(self, number: int, slots: Tensor, rings: Tensor | None) -> Tensor:
        state = super().current(number, slots, rings)
        if rings is None or self._records is None:
            return state
        live = self.rings.records.cursors[rings.long(), 0]
        return state_behind(state, self._records.layer(number), rings.long(), live)

    def make_current(self, requests: int, tables: Sequence[Tensor]) -> None:
        """Write the states of a step's requests whose rings have live rows: stock reads them next.

        Args:
            tables: by KV-cache group, [>= requests, >= 1] int32, the slot of each request.
        """
        cursors = self.rings.records.cursors
        cursors[:, 1] = cursors[:, 0]
        ones = torch.ones(requests, dtype=torch.int32, device=cursors.device)
        groups = sorted({layer.cache_group for layer in self.layers})
        slots = StateTables(tuple(tables[group] for group in groups), ones)
        commit = self._commit_of(range(len(self.layers)), slots)
        commit(ones, ones - 1, RECORD_ROWS)
        self.rings.empty()

    def commit(self, num_sampled: Tensor) -> StateOutcome:
        """See `WindowStates`. Raises EngineError if not every layer has staged."""
        staged, self.rows = len(self._staged), None
        if staged < len(self.layers):
            problem = f"{staged} of {len(self.layers)} layers staged a window"
            raise EngineError.at(ONE_SLOT, problem, staged)
        if self._windows is not None:
            num_sampled = num_sampled[: len(self._windows)][self._windows]
            self.rows = len(num_sampled)
        return super().commit(num_sampled)

    def drop(self) -> None:
        super().drop()
        self.rings.in_use = False

    def abandon(self) -> None:
        """`drop` the window of a step that died. Raises EngineError: nothing can go on after it."""
        lost = bool(self._staged)
        self.drop()
        if lost:
            raise EngineError.at(ONE_SLOT, "a step died before its states were committed")
