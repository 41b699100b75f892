"""When each step began on the device: one CUDA event a step, read late.

The time from one step's start to the next one's holds all that the device did for the step, and
how long it waited for the host. An event costs the host about a microsecond in every cell alike.
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
    """Milliseconds between two events; None where one is missing. Waits for the second."""
    if start is None or end is None or end is PASSED:
        return None
    end.synchronize()
    return float(start.elapsed_time(end))
