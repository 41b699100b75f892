"""Waits of a known length in a window, each measured while it lasts."""

import time
from typing import Any, Protocol


class Wait(Protocol):
    """A wait that is measured while it lasts."""

    def wait(self, seconds: float) -> None:
        """Hold up the window by about so long."""

    def take(self) -> list[float]:
        """How long each wait since the last call really was, in seconds."""


class HostWait:
    """The host spins."""

    def __init__(self) -> None:
        self._waits: list[float] = []

    def wait(self, seconds: float) -> None:
        """Return when the time is over."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            pass
        self._waits.append(time.perf_counter() - began)

    def take(self) -> list[float]:
        """The waits, and forget them."""
        waits, self._waits = self._waits, []
        return waits


class DeviceWait:
    """A kernel spins on the current stream; CUDA events before and after it time it."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._events: list[tuple[Any, Any]] = []
        self._spin(1_000_000)  # the first launch loads the kernel
        self.take()
        self._spin(10_000_000)
        self._cycles_a_second = 10_000_000 / self.take()[0]

    def wait(self, seconds: float) -> None:
        """Launch the kernel and return at once."""
        self._spin(int(seconds * self._cycles_a_second))

    def take(self) -> list[float]:
        """The waits, once the device has come through them."""
        self._cuda.synchronize()
        events, self._events = self._events, []
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def _spin(self, cycles: int) -> None:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._cuda._sleep(cycles)
        end.record()
        self._events.append((start, end))
