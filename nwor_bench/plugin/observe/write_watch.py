"""Checks what staging writes to the cache, and when: on in the gate, off in timed batches.

When a window opens, the slots of its staged rows are filled with a constant that no K or V row
consists of. A slot that has changed before the commit was written directly; after the commit the
rows that have changed are those that were committed, the same in every layer. Nothing reads these
slots in between: in mode off they are overwritten before attention.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_bench.plugin.layers import LayerCache, slot_index
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.window import State, Window, WindowBatch

MARK = 208.0
"""Exact in float32, float16, bfloat16 and e4m3, and finite: masked positions are multiplied."""

MARK_IN_E4M3 = 0x75
"""The byte of `MARK` in an fp8 cache, which vLLM keeps as uint8."""


COUNTS = ("windows", "early", "uneven", "written", "without_slot")
"""Counts of a watch; see `WriteWatch.switch`."""


class WriteWatch:
    """Watches one worker's window while it is on."""

    def __init__(self, window: Window, layers: Sequence[LayerCache]):
        self._window = window
        self._layers = [(_as_bytes_if_fp8(layer.kv_cache), layer.slot_row) for layer in layers]
        self._counts: Counter[str] = Counter()
        self._slots: Tensor | None = None
        self._drafts: Tensor | None = None
        self._without_slot = 0
        self._patches = PatchSet(
            [
                Patch(window, "begin", self._wrap_begin),
                Patch(window, "commit", self._wrap_commit),
                Patch(window, "close", self._wrap_close),
            ]
        )

    def switch(self, on: bool) -> dict[str, int]:
        """Start or stop; the counts since it was switched on.

        Returns:
            "windows": committed windows; "early": rows x layers that something wrote before the
            commit; "uneven": rows that some layers hold after it and others do not; "written":
            drafts in the cache after it; "without_slot": drafts that vLLM gave no slot, which
            cannot be written.
        """
        if on and not self._patches.applied:
            self._patches.apply()
        elif not on and self._patches.applied:
            self._patches.undo()
        counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTS}

    def _wrap_begin(self, original: Callable[..., None]) -> Callable[..., None]:
        def begin(batch: WindowBatch, **how: Any) -> None:
            original(batch, **how)
            self._slots = None
            # A capture's window has no slots, and a control's drafts are written at once.
            if not (how.get("repeats") or how.get("control")):
                self._mark(batch)

        return begin

    def _mark(self, batch: WindowBatch) -> None:
        by_group, drafts = batch.slots, _is_draft(batch)
        if by_group.dim() == 1:
            by_group = by_group[None]
        real = by_group[self._layers[0][1]] >= 0  # a token has a slot in every group, or in none
        self._slots = by_group[:, real]
        self._drafts = drafts[real]
        self._without_slot = max(batch.total - int(self._drafts.sum()), 0)
        for cache, row in self._layers:
            cache[slot_index(cache, self._slots[row])] = _mark_of(cache)

    def _wrap_commit(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def commit() -> bool:
            if self._slots is not None and self._window.state is State.ACCEPTED:
                self._counts["early"] += int(self._written().sum())
            return original()

        return commit

    def _wrap_close(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def close() -> Any:
            if self._slots is not None and self._window.state is State.COMMITTED:
                written = self._written()
                self._counts["windows"] += 1
                self._counts["without_slot"] += self._without_slot
                self._counts["uneven"] += int((written.any(0) != written.all(0)).sum())
                self._counts["written"] += int(written.any(0)[self._drafts].sum())
            self._slots = None
            return original()

        return close

    def _written(self) -> Tensor:
        """[layers, rows] bool: which staged rows no longer hold the mark."""
        assert self._slots is not None
        changed = [
            cache[slot_index(cache, self._slots[row])] != _mark_of(cache)
            for cache, row in self._layers
        ]
        return torch.stack([rows.flatten(1).any(1) for rows in changed])


def _is_draft(batch: WindowBatch) -> Tensor:
    """[rows] bool: not the certain first token, which a whole step stages too."""
    rows = torch.arange(batch.slots.shape[-1], device=batch.slots.device)
    certain = getattr(batch, "certain", 0)
    length = getattr(batch, "tokens_per_request", None)
    return rows >= 0 if not certain or length is None else rows % length >= certain


def _as_bytes_if_fp8(cache: Tensor) -> Tensor:
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def _mark_of(cache: Tensor) -> float:
    return MARK_IN_E4M3 if cache.dtype is torch.uint8 else MARK
