"""Launches by window: what PyTorch's profiler did not record is not counted as 0."""

from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from nwor_bench.errors import ExitCode
from nwor_bench.plugin.observe import window_counters as launch_windows
from nwor_bench.plugin.observe.window_counters import LaunchWindows


def batch(windows: LaunchWindows, runner: Any, drafts: list[dict[str, list[int]]]) -> Any:
    windows.start()
    for one in drafts:
        runner.execute_model(
            SimpleNamespace(scheduled_spec_decode_tokens=one, total_num_scheduled_tokens=5)
        )
    return windows.take()


@pytest.fixture
def runner() -> Any:
    return SimpleNamespace(execute_model=lambda scheduled: None)


@pytest.fixture
def windows(runner: Any) -> LaunchWindows:
    counted = LaunchWindows(SimpleNamespace(runner=runner))
    counted.switch(True)
    return counted


@pytest.mark.slow  # PyTorch's profiler
def test_a_profiler_that_hears_no_cuda_is_refused(
    windows: LaunchWindows, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another profiler holds CUPTI: the marks are there, and no call is."""
    real = launch_windows.read_calls
    monkeypatch.setattr(launch_windows, "read_calls", lambda profiler: ([], real(profiler)[1]))
    with refused("--counters launches", naming="CUPTI") as refusal:
        batch(windows, runner, [{}, {"a": [1]}])
    assert refusal.value.exit_code == ExitCode.BAD_USAGE
    assert batch(windows, runner, [{}, {}])["windows"] == []  # a prefill has none to count
