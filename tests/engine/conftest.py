"""Real vLLM on the CPU: engines that are closed when their module ends."""

import os
from collections.abc import Callable, Iterator

import pytest

from nwor_bench.config import SweepSpec
from nwor_bench.engine import VllmEngine
from nwor_bench.pairs import ResolvedPair


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmEngine]]:
    """Start engines (pair, spec) that are closed when the module ends."""
    saved = dict(os.environ)
    started: list[VllmEngine] = []

    def start(pair: ResolvedPair, spec: SweepSpec) -> VllmEngine:
        log = tmp_path_factory.mktemp("engine") / "engine.log"
        started.append(VllmEngine(pair, spec, log))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    os.environ.clear()
    os.environ.update(saved)
