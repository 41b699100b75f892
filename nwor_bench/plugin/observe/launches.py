"""Launches and host waits for each window of a batch, from PyTorch's profiler.

In place only while launches are counted. A window lasts from the start of its step on the host to
the start of the next one.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from nwor_bench.errors import BenchError, ConfigError
from nwor_bench.instruments.launches import STEP, count_calls, open_profiler, read_calls
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.plugin.runner_hook import RunnerHook


class LaunchWindows:
    """Counts the CUDA calls of one runner's windows, batch by batch.

    Args:
        hook: the runner's hook, of either runner.
    """

    def __init__(self, hook: RunnerHook):
        self._hook = hook
        self._patches: PatchSet | None = None
        self._profiler: Any = None
        self._is_window: list[bool] = []

    def switch(self, on: bool) -> None:
        """Mark steps, or stop; call it between batches."""
        if on == (self._patches is not None):
            return
        if self._patches is not None:
            self._patches.undo()
            self._patches = None
            return
        wrap = Patch(self._hook.runner, "execute_model", self._wrap_execute_model)
        self._patches = PatchSet([wrap])
        self._patches.apply()

    def start(self) -> None:
        """Start recording."""
        self._is_window = []
        self._profiler = open_profiler()
        self._profiler.start()

    def take(self) -> dict[str, Any]:
        """End the batch: each window's counts, in their order."""
        if self._profiler is None:
            raise BenchError("launches are not being counted in this worker")
        with torch.profiler.record_function(STEP):  # the end of the last window
            pass
        began = time.perf_counter()
        self._profiler.stop()
        calls, marks = read_calls(self._profiler)
        self._profiler = None
        if len(marks) != len(self._is_window) + 1:
            raise BenchError(
                f"{len(self._is_window)} steps ran and {len(marks) - 1} show in PyTorch's "
                "profiler: launches cannot be told apart by window"
            )
        if not calls and any(self._is_window):  # a window without a launch there is none
            raise ConfigError.at(
                "--launch-counts",
                "PyTorch's profiler recorded no call of CUDA in a whole batch, "
                "and 0 would be wrong; run it under no other profiler, since CUPTI serves one at "
                "a time, or leave --launch-counts out",
            )
        places = [place for place, window in enumerate(self._is_window) if window]
        starts, ends = [marks[p] for p in places], [marks[p + 1] for p in places]
        facts = {"calls": len(calls), "read_s": round(time.perf_counter() - began, 3)}
        return {"windows": count_calls(calls, starts, ends), "facts": facts}

    def _wrap_execute_model(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run") and scheduler_output.total_num_scheduled_tokens:
                self._is_window.append(bool(scheduler_output.scheduled_spec_decode_tokens))
                with torch.profiler.record_function(STEP):
                    pass
            return original(scheduler_output, *args, **kwargs)

        return execute_model
