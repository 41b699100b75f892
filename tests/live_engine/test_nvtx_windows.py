"""NVTX ranges of windows on real vLLM: their number, nesting, payloads; off, nothing is called."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from engine_tools import (
    prompts_of,
    run_cell,
    tiny_pair,
    tiny_spec,
    worker_of,
)
from nvtx_recorder import NvtxModule, NvtxThatMustNotBeCalled, Recorded, RecordingDomain

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.instruments.nvtx_ranges import DOMAIN, NVTX_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.long]

PROMPTS = prompts_of([24, 31, 18, 40])
LAYERS = 3


@pytest.fixture(scope="module")
def nvtx() -> Any:
    """Replaces the package before the engine starts, with ranges on."""
    patch = pytest.MonkeyPatch()
    module = NvtxModule()
    patch.setitem(sys.modules, "nvtx", module)
    patch.setenv(NVTX_VARIABLE, "1")
    yield module
    patch.undo()


@pytest.fixture(scope="module", params=["ngram", "draft_model"])
def engine(
    request: pytest.FixtureRequest,
    nvtx: NvtxModule,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmEngine:
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), request.param)
    return start_engine(pair, tiny_spec())


@pytest.fixture
def domain(engine: VllmEngine, nvtx: NvtxModule) -> RecordingDomain:
    domain = nvtx.domains[DOMAIN]
    domain.take()
    return domain


def drafts_of(output: BatchOutput) -> list[int]:
    return [window.draft_tokens for window in output.windows]


def assert_windows(found: Recorded, output: BatchOutput, category: str) -> list[Recorded]:
    """One range a window, numbered as its record is, and nothing outside windows."""
    windows = found.inside
    assert {window.name for window in windows} == {"window"}
    assert [window.payload for window in windows] == list(range(len(output.windows)))
    assert len(windows) > 3
    for window in windows:
        assert window.category == category
        assert {child.category for child in window.inside} == {category}
    return windows


def test_ranges_of_a_staged_batch(engine: VllmEngine, domain: RecordingDomain) -> None:
    output = run_cell(engine, "stage", "graph", PROMPTS)
    windows = assert_windows(domain.take(), output, "stage x graph")
    for window, drafts in zip(windows, drafts_of(output), strict=True):
        assert window.names == ["forward", "sample", "mask", "commit", "draft"]
        forward, sample, mask, commit, draft = window.inside
        assert forward.names == ["stage"] * LAYERS
        assert {stage.payload for stage in forward.inside} == {drafts}
        assert (mask.payload, commit.payload) == (drafts, drafts)
        requests = sample.payload
        assert requests is not None
        assert 1 <= requests <= len(PROMPTS)
        assert draft.payload == requests
        # Every request has its drafts and one token more in the step.
        assert forward.payload == drafts + requests


def test_switched_off_live_nothing_of_nvtx_is_called(
    engine: VllmEngine, domain: RecordingDomain, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(engine)
    with_ranges = {name for name in vars(worker.model_runner) if _is_wrapped(worker, name)}
    engine.set_nvtx(False)
    without = {name for name in vars(worker.model_runner) if _is_wrapped(worker, name)}
    assert with_ranges - without == {"propose_draft_token_ids"}  # the others the hook wraps too
    assert not any("nvtx_patches" in _module(worker, name) for name in without)
    monkeypatch.setitem(sys.modules, "nvtx", NvtxThatMustNotBeCalled())
    for name in ("push_range", "pop_range", "get_event_attributes"):
        monkeypatch.setattr(domain, name, lambda *_, **__: pytest.fail("nvtx was called"))
    staged = run_cell(engine, "stage", "graph", PROMPTS)
    assert staged.windows
    monkeypatch.undo()
    engine.set_nvtx(True)
    again = run_cell(engine, "stage", "graph", PROMPTS)
    assert again.token_ids == staged.token_ids
    assert_windows(domain.take(), again, "stage x graph")


def _is_wrapped(worker: Any, name: str) -> bool:
    return "nwor_bench" in _module(worker, name)


def _module(worker: Any, name: str) -> str:
    return str(getattr(vars(worker.model_runner)[name], "__module__", ""))
