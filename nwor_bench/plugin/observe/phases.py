"""Times of a window's phases on the device: CUDA events between them, read late.

Off unless asked for, since events cost host time (a sweep measures how much). Recording never
waits; `durations` is called when the harness drains, after the batch's tokens have arrived.
"""

from typing import Any

import torch

PHASES = {
    "forward_ms": ("forward_start", "sample_start"),
    "sample_ms": ("sample_start", "sample_end"),
    "mask_ms": ("sample_end", "mask_end"),
    "commit_ms": ("commit_start", "commit_end"),
}
"""Each time of a window, and the two marks that bound it.

There is no `mask_ms` where the commit decides what was accepted.
"""

Marks = dict[str, Any]


class Probe:
    """Records one event a mark while switched on."""

    def __init__(self) -> None:
        self.on = False
        self._marks: Marks = {}

    def mark(self, name: str) -> None:
        """Record an event on the current stream; nothing while off."""
        if self.on:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks[name] = event

    def take(self) -> Marks:
        """The marks of the window that has just ended."""
        marks, self._marks = self._marks, {}
        return marks


def durations(marks: Marks) -> dict[str, float]:
    """Milliseconds of every phase whose two marks were recorded; waits for the last one."""
    found = {}
    for name, (start, end) in PHASES.items():
        if start in marks and end in marks:
            marks[end].synchronize()
            found[name] = marks[start].elapsed_time(marks[end])
    return found
