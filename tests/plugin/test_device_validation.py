"""Which way a validation is launched, eagerly or by a graph, and what is counted: no GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.runner_v2 import device_validation
from nwor_bench.plugin.runner_v2.device_validation import TRIALS, DeviceValidator
from nwor_bench.records.types import ScvMode

SHAPE = ("mask", 4, 2)


class Bench:
    """A validator whose graphs are stand-ins, and what its launches were given."""

    def __init__(self, monkeypatch, mode: ScvMode, can_capture: bool = True):
        self.can_capture, self.capturing = can_capture, None
        monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(device_validation, "unused_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        self.validator = DeviceValidator(2, 4, torch.device("cpu"))
        self.validator.switch(mode)
        self.given: list[list[int]] = []
        self.kept = [torch.zeros(4, dtype=torch.int32) for _ in range(8)]

    @contextmanager
    def capture(self, graph, **_):
        if not self.can_capture:
            raise RuntimeError
        self.capturing = graph
        yield
        self.capturing = None

    def launch(self, counts: Tensor) -> None:
        launch = lambda: self.given.append(counts.tolist())  # noqa: E731
        if self.capturing is None:
            launch()
        else:
            self.capturing.replay = launch

    def window(self, place: int = 0, shape=SHAPE) -> str:
        """One window whose counts lie at this place; checks that it was validated on them."""
        counts = self.kept[place].random_(0, 100)
        seen = len(self.given)
        path, _ = self.validator.run(shape, 4, self.launch, counts)
        assert self.given[seen:] == [counts.tolist()]
        return path


def test_graph_captures_a_shape_when_it_is_first_seen_and_then_replays(monkeypatch):
    bench = Bench(monkeypatch, ScvMode.GRAPH)
    assert [bench.window(place) for place in (0, 1, 2)] == ["capture", "graph", "graph"]
    assert bench.window(0, ("mask", 2, 2)) == "capture"
    counters = bench.validator.counters
    assert (counters["scv_graph_misses"], counters["scv_graph_hits"]) == (2, 2)
    assert counters["scv_launches"] == 2 + 2 * 2  # a replay of copied counts is two launches


@pytest.mark.parametrize(("eager_s", "replay_s", "wins"), [(9e-6, 5e-6, True), (5e-6, 9e-6, False)])
def test_adaptive_tries_both_ways_and_keeps_the_cheaper(monkeypatch, eager_s, replay_s, wins):
    bench = Bench(monkeypatch, ScvMode.ADAPTIVE)
    now = [0.0]
    monkeypatch.setattr(device_validation.time, "perf_counter", lambda: now[0])
    run = bench.launch

    def eager(counts):
        now[0] += eager_s
        run(counts)

    bench.launch = eager
    original = device_validation._Captured.replay

    def replay(captured, given):
        before = now[0]
        original(captured, given)
        now[0] = before + replay_s

    monkeypatch.setattr(device_validation._Captured, "replay", replay)
    paths = [bench.window() for _ in range(3 * TRIALS + 2)]
    assert paths[: TRIALS - 1] == ["device"] * (TRIALS - 1)
    assert paths[TRIALS - 1] == "capture"
    assert set(paths[TRIALS : 2 * TRIALS]) == {"graph"}
    assert set(paths[2 * TRIALS :]) == {"graph" if wins else "device"}
    assert bench.validator.counters["scv_kept_eager"] == (0 if wins else TRIALS + 2)


@pytest.mark.parametrize("mode", [ScvMode.GRAPH, ScvMode.ADAPTIVE])
def test_a_failed_capture_leaves_eager_launches_and_is_counted(monkeypatch, mode):
    bench = Bench(monkeypatch, mode, can_capture=False)
    assert {bench.window() for _ in range(TRIALS + 3)} == {"device"}
    validator = bench.validator
    expected = TRIALS + 3 if mode is ScvMode.GRAPH else 4
    assert validator.fallbacks == {"graph_capture:RuntimeError": expected}
    assert validator.counters["scv_fallback_count"] == expected


def test_a_shape_too_many_evicts_the_one_longest_unused(monkeypatch):
    monkeypatch.setattr(device_validation, "MAX_GRAPHS", 2)
    bench = Bench(monkeypatch, ScvMode.GRAPH)
    shapes = [("mask", n, 2) for n in (1, 2, 4)]
    assert [bench.window(0, shape) for shape in shapes[:2]] == ["capture", "capture"]
    assert bench.window(1, shapes[0]) == "graph"
    assert bench.window(0, shapes[2]) == "capture"
    assert bench.validator.counters["scv_graph_evictions"] == 1
    assert bench.window(1, shapes[0]) == "graph"
    assert bench.window(1, shapes[1]) == "capture"
