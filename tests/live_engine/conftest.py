"""Real vLLM: engines that are closed when their module ends."""

import os
from collections.abc import Callable, Iterator

import pytest
from engine_tools import OUR_ATTENTION, close, tiny_pair, tiny_spec
from own_process import run_apart

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.workload.config import RunSpec


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `own_process` in a process of its own, and any other here."""
    return run_apart(pyfuncitem) or None


@pytest.fixture(scope="session", autouse=True)
def our_attention() -> Iterator[None]:
    """Windows are staged whatever is the fastest; a test of the choice says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NWOR_ATTENTION", OUR_ATTENTION)
        yield


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VllmEngine]]:
    """Start engines (pair, spec) that are closed when the module ends."""
    saved = dict(os.environ)
    started: list[VllmEngine] = []

    def start(pair: ResolvedPair, spec: RunSpec) -> VllmEngine:
        if spec.tensor_parallel_size > 1:  # ranks share out the processors as for a user
            os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        log = tmp_path_factory.mktemp("engine") / "engine.log"
        started.append(VllmEngine(pair, spec, log))
        return started[-1]

    yield start
    for engine in started:
        engine.close()
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture
def start_alone(start_engine: Callable[..., VllmEngine]) -> Iterator[Callable[..., VllmEngine]]:
    """Start an engine that is closed when the test ends: a GPU's process holds one at a time."""
    started: list[VllmEngine] = []

    def start(pair: ResolvedPair, spec: RunSpec) -> VllmEngine:
        started.append(start_engine(pair, spec))
        return started[-1]

    yield start
    for engine in started:
        close(engine)


@pytest.fixture
def environment_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """run_one sets vLLM's switches for its process."""
    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE"):
        monkeypatch.setenv(name, "off")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    """A draft model with partial acceptance: every window has drafts to keep and to drop."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), "draft_model")
    return start_engine(pair, tiny_spec(block_size=32))
