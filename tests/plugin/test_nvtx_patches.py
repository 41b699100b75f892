"""Ranges around a V2 runner's windows, on stand-ins shaped like it: the GPU's side of NVTX."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from live_windows import scheduled
from nvtx_recorder import NvtxModule, RecordingDomain

from nwor_bench.instruments.nvtx_ranges import DOMAIN
from nwor_bench.plugin.observe.nvtx import WindowRanges
from nwor_bench.plugin.patching import Patch, PatchSet
from nwor_bench.records.types import NworMode, ScvMode


class Model(torch.nn.Module):
    """Called as vLLM calls a model: through torch's `__call__`."""

    def forward(self, tokens: int) -> int:
        return tokens


class Runner:
    """The methods of vLLM's V2 runner that matter, calling each other as they do there."""

    def __init__(self, eager: bool) -> None:
        self.model = Model()
        self.eager = eager
        self.speculator = SimpleNamespace(propose=lambda: "drafts")
        self.cudagraph_manager = SimpleNamespace(run_fullgraph=lambda desc: "hidden")

    def execute_model(self, scheduler_output: Any) -> None:
        self.model(3) if self.eager else self.cudagraph_manager.run_fullgraph("desc")

    def sample_tokens(self, grammar: Any) -> str:
        self.sample()
        self.speculator.propose()
        return "output"

    def sample(self) -> str:
        return "sampled"


class Hook:
    """A hook whose own wrapper around `sample` validates and commits after it."""

    name = "V2"

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.nwor_mode = NworMode.STAGE
        self.validator = SimpleNamespace(mode=ScvMode.GRAPH, validate=lambda: "mask")
        self.window = SimpleNamespace(stage=lambda: True, commit=lambda: True)
        self.graph_sets = (SimpleNamespace(replay=lambda desc: "hidden"),)
        self.modes: list[Any] = []
        self._patches = PatchSet([Patch(runner, "sample", self._wrap_sample)])
        self.attach()

    @property
    def attached(self) -> bool:
        return self._patches.applied

    def attach(self) -> None:
        self._patches.apply()

    def detach(self) -> None:
        self._patches.undo()

    def set_modes(self, *modes: Any) -> None:
        self.modes.append(modes)

    def drain(self, output_lengths: Any) -> list[Any]:
        return []

    def _wrap_sample(self, original: Any) -> Any:
        def sample() -> str:
            output = original()
            self.validator.validate()
            self.window.commit()
            return str(output)

        return sample


@pytest.fixture
def domain(monkeypatch: pytest.MonkeyPatch) -> RecordingDomain:
    module = NvtxModule()
    monkeypatch.setitem(sys.modules, "nvtx", module)
    return module.get_domain(DOMAIN)


def step(runner: Runner, **drafts: int) -> None:
    """A step of windows; a prefill without any."""
    runner.execute_model(scheduled(drafts, 0 if drafts else 7))
    assert runner.sample_tokens(None) == "output"


@pytest.mark.parametrize("eager", [True, False])
def test_a_windows_ranges(domain: RecordingDomain, eager: bool) -> None:
    runner = Runner(eager)
    hook = Hook(runner)
    ranges = WindowRanges(hook)
    ranges.switch(True)
    assert hook.attached
    assert hook.modes == [(NworMode.STAGE, ScvMode.GRAPH)]
    step(runner)  # a prefill is no window
    for _ in range(2):
        step(runner, a=3, b=1)
    hook.drain(None)
    step(runner, a=1)
    windows = domain.take().inside
    assert [(window.name, window.payload) for window in windows] == [
        ("window", number) for number in (0, 1, 0)
    ]
    for window in windows:
        assert window.names == ["forward", "sample", "mask", "commit", "draft"]
        assert {inner.category for inner in window.inside} == {"stage x graph"}
    assert [inner.payload for inner in windows[0].inside] == [6, 2, 4, 4, 2]
    ranges.switch(False)
    step(runner, a=1)
    assert domain.take().inside == []
    assert "forward" not in vars(runner.model)
    assert "execute_model" not in vars(runner)


def test_a_failing_forward_leaves_no_range_open(domain: RecordingDomain) -> None:
    runner = Runner(eager=False)
    hook = Hook(runner)
    runner.cudagraph_manager.run_fullgraph = Mock(side_effect=RuntimeError("illegal access"))
    WindowRanges(hook).switch(True)
    with pytest.raises(RuntimeError, match="illegal access"):
        step(runner, a=1)
    assert [window.names for window in domain.take().inside] == [["forward"]]
