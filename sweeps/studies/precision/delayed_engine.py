"""An engine whose windows take longer in one cell, by waits that are measured while they last."""

import time
from typing import Any

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.records.cell import Arguments
from nwor_bench.records.types import Cell

INJECTED = Arguments("injected")


class HostWait:
    """The host spins."""

    def __init__(self) -> None:
        self._waits: list[float] = []

    def wait(self, seconds: float) -> None:
        """Hold up the window by about so long."""
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            pass
        self._waits.append(time.perf_counter() - began)

    def take(self) -> list[float]:
        """How long each wait since the last call really was, in seconds."""
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
        """How long each wait since the last call was, once the device has come through them."""
        self._cuda.synchronize()
        events, self._events = self._events, []
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def _spin(self, cycles: int) -> None:
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._cuda._sleep(cycles)
        end.record()
        self._events.append((start, end))


class DelayedEngine:
    """The engine, whose windows take longer in the injected cell.

    The wait stands around the runner's `sample_tokens`, outside of the plugin's hook and within
    the window's time, which ends when the hook's `sample_tokens` does.
    """

    def __init__(self, engine: VllmEngine):
        self._engine = engine
        self._injected = False
        self.delay_s = 0.0
        self.waited_ms: list[float] = []
        core = engine._llm.llm_engine.engine_core.engine_core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._wait = HostWait() if self._runner.device.type == "cpu" else DeviceWait()
        self._plant()

    def _plant(self) -> None:
        execute_model, sample_tokens = self._runner.execute_model, self._runner.sample_tokens
        is_window = False

        def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_window
            is_window = bool(scheduler_output.scheduled_spec_decode_tokens)
            return execute_model(scheduler_output, *args, **kwargs)

        def delayed(*args: Any, **kwargs: Any) -> Any:
            if self._injected and is_window:
                self._wait.wait(self.delay_s)
            return sample_tokens(*args, **kwargs)

        self._runner.execute_model, self._runner.sample_tokens = watched, delayed
        self._without = execute_model, sample_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def set_modes(self, cell: Cell) -> None:
        """Switch the delay on in the injected cell."""
        self._injected = cell.arm == INJECTED
        self._engine.set_modes(cell)

    def generate(self, prompts: Any, sampling: Sampling, **more: Any) -> BatchOutput:
        """The engine's; remembers how long the windows of this batch waited."""
        output = self._engine.generate(prompts, sampling, **more)
        waits = self._wait.take()
        if self._injected:
            self.waited_ms.append(1e3 * sum(waits) / max(1, len(waits)))
        return output

    def close(self) -> None:
        """Take the waits out, and close the engine."""
        self._runner.execute_model, self._runner.sample_tokens = self._without
        self._engine.close()
