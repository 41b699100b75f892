"""What tests of commands share."""

import pytest


@pytest.fixture
def never_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused would replace this process."""

    def start() -> None:
        raise AssertionError("it was not refused early")

    monkeypatch.setattr("nwor_bench.engine.preload.run_under_one_openmp", start)
