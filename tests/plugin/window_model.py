"""Attention, staging and cache as plain Python, for the tests of a window's life cycle.

A token's K/V is one number, `layer * 1000 + its row`, so that every cache entry tells whose
it is. Slots are never used twice, so what an earlier window left must stay.
"""

from collections import deque

import torch
from torch import Tensor

from nwor_bench.plugin.window import Window, WindowBatch

WRITTEN_BY_OTHERS = -5


class ModelStaging:
    """Staging over a modelled cache: `cache[layer][slot]` is a number. Fails when told to."""

    def __init__(self, num_layers: int):
        self.num_layers = num_layers
        self.cache: list[dict[int, int]] = [{} for _ in range(num_layers)]
        self.held: dict[int, list[int]] = {}
        self.stage_faults: deque[str | BaseException | None] = deque()
        self.commit_fault: str | BaseException | None = None
        self.layers_before_commit_fault = 0
        self.direct_writes = 0

    def reset(self) -> None:
        self.held = {}

    def stage(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
        assert layer not in self.held, "the last window was not forgotten"
        fault = self.stage_faults.popleft() if self.stage_faults else None
        if fault is not None:
            self.held[layer] = [WRITTEN_BY_OTHERS] * rows.numel()  # a copy cut off half-way
            return self._fail(fault)
        assert torch.equal(key, value)
        self.held[layer] = key[rows].tolist()
        return ""

    def commit(self, slots: Tensor, accepted: Tensor) -> str:
        fault, self.commit_fault = self.commit_fault, None
        layers = range(self.num_layers)
        if isinstance(fault, BaseException):  # an exception may come between two layers
            layers = range(self.layers_before_commit_fault)
        if not isinstance(fault, str):
            for layer in layers:
                for i in accepted.nonzero().flatten().tolist():
                    self.cache[layer][int(slots[i])] = self.held[layer][i]
        return self._fail(fault) if fault is not None else ""

    def write_directly(self, layers: list[int], slots: Tensor) -> None:
        self.direct_writes += 1
        for layer in layers:
            self.cache[layer].update(zip(slots.tolist(), self.held[layer], strict=True))

    @staticmethod
    def _fail(fault: str | BaseException) -> str:
        if isinstance(fault, BaseException):
            raise fault
        return fault


class ModelEngine:
    """What the attention hook does with a window, on the modelled cache."""

    def __init__(self, num_layers: int):
        self.staging = ModelStaging(num_layers)
        self.window = Window(self.staging)
        self._next_slot = 0
        self.num_tokens = 0
        self.slots: list[int] = []
        self.rows: list[int] = []

    def batch(self, num_draft_tokens: tuple[int, ...]) -> WindowBatch:
        """A window's batch: each request has one certain token and then its drafts."""
        self.rows, row = [], 0
        for drafts in num_draft_tokens:
            self.rows += range(row + 1, row + 1 + drafts)
            row += 1 + drafts
        self.num_tokens = row
        step_slots = torch.arange(self._next_slot, self._next_slot + row)
        self._next_slot += row
        rows = torch.tensor(self.rows).long()
        self.slots = step_slots[rows].tolist()
        direct_slots = step_slots.clone()
        direct_slots[rows] = -1
        return WindowBatch(num_draft_tokens, rows, step_slots[rows], direct_slots)

    def kv(self, layer: int) -> Tensor:
        """K (and V) of the step's tokens in one layer."""
        return layer * 1000 + torch.arange(self.num_tokens)

    def forward(self, layer: int) -> bool:
        """One layer's attention: stage the drafts, or write them. True if they were staged."""
        kv = self.kv(layer)
        if self.window.is_staging and self.window.stage(layer, kv, kv):
            return True
        self.staging.cache[layer].update(zip(self.slots, kv[self.rows].tolist(), strict=True))
        return False

    def expected(self, layer: int) -> dict[int, int]:
        """Every draft of the window at its slot, as stock vLLM writes them."""
        return dict(zip(self.slots, self.kv(layer)[self.rows].tolist(), strict=True))

    def in_cache(self, layer: int) -> dict[int, int]:
        """The window's drafts that the layer's cache holds now."""
        cache = self.staging.cache[layer]
        return {slot: cache[slot] for slot in self.slots if slot in cache}
