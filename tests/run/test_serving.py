"""An open loop's arrivals, and when it is left out."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.engine.protocol import Sampling, ServedLoop
from nwor_bench.records.types import Phase
from nwor_bench.run.serving import LOAD, _arrivals, serve_line

RATES = tuple(Rate(n, k, 1 + k / 2, 1, 3, "FASTER", 1.1, 2, 9) for n in (1, 4) for k in (1, 2))
WORTH = Worth(RATES, {1: 2, 4: 1}, 3, {})


def test_requests_come_as_often_as_each_size_can_take() -> None:
    """Little's law: size = rate x latency, at LOAD of it; 2 requests for each of a size."""
    each = []
    for seed in range(400):
        times = _arrivals(Random(seed), {4: 2.0, 1: 1.0})
        assert times == sorted(times)
        each.append((len(times), times[1], times[-1] - times[1]))
    assert {number for number, _, _ in each} == {2 + 8}
    small, large = (sum(row[n] for row in each) / len(each) for n in (1, 2))
    assert small == pytest.approx(2 / (LOAD * 1 / 1.0), rel=0.1)
    assert large == pytest.approx(8 / (LOAD * 4 / 2.0), rel=0.1)


class Engine:
    """Takes a share of 6 s on a clock of its own, and remembers what it was asked to serve."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, Sampling, Any]] = []

    def serve(self, prompts: Any, arrivals: Any, sampling: Sampling, schedule: Any) -> ServedLoop:
        self.asked.append((len(prompts), sampling, schedule))
        self.now += 6.0 * sampling.max_new_tokens / 60
        return ServedLoop(2.0, (5.0,) * len(prompts))


def serve(worth: Worth, seconds: float) -> tuple[Engine, list[Any], list[str]]:
    batch = SimpleNamespace(
        phase=Phase.GATE, latency_ms=1000.0, cell=SimpleNamespace(is_baseline=True)
    )
    runs: Any = {size: SimpleNamespace(batches=[batch]) for size in (1, 4)}
    block = SimpleNamespace(prompts=("a", "b", "c"))
    prepared: Any = SimpleNamespace(
        encode=lambda prompts: [[1]] * len(prompts), plan=SimpleNamespace(blocks=[block]),
        spec=SimpleNamespace(seed=0, scenario=SimpleNamespace(max_new_tokens=60)),
    )  # fmt: skip
    engine: Any = Engine()
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nwor_bench.run.serving.time.perf_counter", lambda: engine.now)
        rows = serve_line(engine, prepared, runs, worth, seconds, said.append)
    return engine, rows, said


def test_every_arm_serves_every_block_within_the_time() -> None:
    """A trace takes 2 / 0.8 x (1 + 1) + 1 = 6 s, three blocks of three arms 54 s: in half of that
    requests are half as long, in three times as long there are nine blocks."""
    engine, rows, _ = serve(WORTH, 27.0)
    assert {(n, sampling.max_new_tokens) for n, sampling, _ in engine.asked} == {(10, 30)}
    assert [row["arm"] for row in rows[:3]] == ["line"] * 3
    assert {row["arm"] for row in rows} == {"line", "k = 2", "k = 0"}
    schedules = [str(schedule) for _, _, schedule in engine.asked]
    assert set(schedules) == {"[[1, 1, 2], [2, 4, 1]]", "[[1, 4, 2]]", "[[1, 4, 0]]"}
    assert len(schedules) == 9
    engine, _, _ = serve(WORTH, 162.0)
    assert len(engine.asked) == 27
    assert {sampling.max_new_tokens for _, sampling, _ in engine.asked} == {60}
    _, rows, _ = serve(replace(WORTH, best={1: 2, 4: 2}), 60.0)
    assert {row["arm"] for row in rows} == {"line", "k = 0"}  # the line is k = 2


@pytest.mark.parametrize(
    ("worth", "seconds", "naming"),
    [
        (WORTH, 5.0, "--serve 8s"),  # 54 s x 8 / 60
        (replace(WORTH, best={1: 0, 4: 0}), 60.0, "nothing was served"),
    ],
)
def test_no_time_or_nothing_to_serve(worth: Worth, seconds: float, naming: str) -> None:
    engine, rows, (said,) = serve(worth, seconds)
    assert not engine.asked
    assert not rows
    assert naming in said
