"""Times on the device from CUDA events, read late: of whole steps and of a window's phases.

The time from one step's start to the next one's holds all that the device did for the step, and
how long it waited for the host. Both are off unless asked for: an event costs the host about a
microsecond. Recording never waits.
"""

from typing import Any

import torch


class _Passed:
    """The mark of a device that has done its work when the host goes on: a CPU's."""

    def query(self) -> bool:
        """Always: the device has come to it."""
        return True


PASSED = _Passed()


class DeviceClock:
    """Marks the steps of a server and of interleaved batches; off elsewhere, so that off x off
    stays stock."""

    def __init__(self, device: torch.device):
        self._has_events = device.type == "cuda"
        self.on = False

    def mark(self) -> Any:
        """An event on the current stream, `PASSED` without CUDA; None while off."""
        if not self.on:
            return None
        if not self._has_events:
            return PASSED
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def has_passed(mark: Any) -> bool:
    """True if the device has come to this mark; False without one. Waits for nothing."""
    return mark is not None and bool(mark.query())


def elapsed_ms(start: Any, end: Any) -> float | None:
    """Milliseconds between two events; None if one is missing. Waits for the second."""
    if start is None or end is None or end is PASSED:
        return None
    end.synchronize()
    return float(start.elapsed_time(end))


PHASES = {
    "forward_ms": ("forward_start", "sample_start"),
    "sample_ms": ("sample_start", "sample_end"),
    "mask_ms": ("sample_end", "mask_end"),
    "commit_ms": ("commit_start", "commit_end"),
}
"""Each time of a window, and the two marks that bound it.

There is no `mask_ms` if the commit decides what was accepted.
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
