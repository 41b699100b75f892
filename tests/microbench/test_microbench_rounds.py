"""Rounds: everyone once a round in random order, until the widths or the limit end it."""

from collections import Counter
from random import Random

from nwor_bench.microbench.bench import WARMUP_ROUNDS, make_rule, run_rounds
from nwor_bench.workload.stopping import FIRST_LOOK

NAMES = ("nwor", "vllm_cuda", "third")


class Machine:
    """Implementations of fixed speeds on a clock that drifts, each with noise of its own."""

    def __init__(self, noise: float):
        self.calls: list[str] = []
        self._noise, self._random = noise, Random(3)

    def replays(self) -> dict:
        return {name: lambda name=name, us=us: self._replay(name, us)
                for us, name in enumerate(NAMES, 1)}  # fmt: skip

    def _replay(self, name: str, us: float) -> float:
        self.calls.append(name)
        drift = 1 + (len(self.calls) - 1) // len(NAMES) / 10
        return us * drift * self._random.uniform(1 - self._noise, 1 + self._noise)


def test_everyone_runs_once_a_round_in_random_order() -> None:
    machine = Machine(noise=0.5)
    measured = run_rounds(machine.replays(), make_rule(40, 0.001), Random(0))
    size = len(NAMES)
    rounds = [tuple(machine.calls[i : i + size]) for i in range(0, len(machine.calls), size)]
    assert all(sorted(each) == sorted(NAMES) for each in rounds)
    assert len(set(rounds[WARMUP_ROUNDS:])) > 5
    assert {len(samples) for samples in measured.values()} == {40}
    assert Counter(machine.calls)["nwor"] == 40 + WARMUP_ROUNDS


def test_drift_that_all_share_does_not_widen_the_ratios() -> None:
    measured = run_rounds(Machine(noise=0.0).replays(), make_rule(100, 0.01), Random(0))
    assert {len(samples) for samples in measured.values()} == {FIRST_LOOK}
    first, second = (measured[name] for name in NAMES[:2])
    ratios = {round(b / a, 9) for a, b in zip(first, second, strict=True)}
    assert ratios == {2.0}


def test_fewer_rounds_than_the_first_look_are_kept_to() -> None:
    measured = run_rounds(Machine(noise=0.5).replays(), make_rule(3, 0.01), Random(0))
    assert {len(samples) for samples in measured.values()} == {3}
