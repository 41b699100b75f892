"""A bench without a GPU: implementations of given speeds, right or wrong, on a set clock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from nwor_bench.microbench.bench import Bench, Replay
from nwor_bench.microbench.cases import L2, OURS, PEERS, Group, LaunchMode, Spec, bytes_moved
from nwor_bench.microbench.rows import Implementation, Implementations, Refusal, Sample, Status

FACTS = {"gpu": "Fake GPU", "l2_bytes": 60 << 20, "copy_gb_per_s": 4000.0}


@dataclass
class FakeStopwatch:
    """Replays that take `us[name]` times a drift that all share within a round."""

    us: Mapping[str, float]
    cannot: frozenset[tuple[str, LaunchMode]] = frozenset()
    prepared: list[tuple[str, L2, LaunchMode]] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise = Random(7)

    def prepare(self, implementation: Implementation, l2: L2, launch: LaunchMode) -> Replay:
        if (implementation.name, launch) in self.cannot:
            raise RuntimeError("cannot be captured\nsecond line")
        self.prepared.append((implementation.name, l2, launch))

        def replay() -> Sample:
            self.replayed.append(implementation.name)
            time_us = self.us.get(implementation.name, 5.0) * self._noise.uniform(0.999, 1.001)
            return Sample(time_us, 40.0 if launch is LaunchMode.EAGER else None)

        return replay


def make_bench(
    spec: Spec,
    us: Mapping[str, float] | None = None,
    *,
    wrong: Mapping[str, str] | None = None,
    refusals: tuple[Refusal, ...] = (),
    seconds_a_group: float = 0.0,
    cannot: frozenset[tuple[str, LaunchMode]] = frozenset(),
) -> Bench:
    """A bench whose peers are all there but for `refusals`; `wrong` says whose check fails how."""
    clock = {"s": 0.0}

    def build(group: Group) -> Implementations:
        clock["s"] += seconds_a_group
        listed = tuple(each for each in refusals if each.name in PEERS[group.kernel])
        out = {refusal.name for refusal in listed}
        implementations = [
            Implementation(
                name,
                28 if name.startswith("vllm") and group.kernel == "commit" else 1,
                None if name == "empty" else bytes_moved(group, spec.shape),
                [lambda: None],
                lambda name=name: (wrong or {}).get(name, ""),
            )
            for name in (OURS, *PEERS[group.kernel])
            if name not in out
        ]
        return Implementations(tuple(implementations), listed)

    stopwatch = FakeStopwatch(us or {OURS: 4.0, "vllm_cuda": 80.0, "copy": 2.0}, cannot)
    return Bench(spec, build, stopwatch, lambda: clock["s"])


NO_FLASHINFER = Refusal("flashinfer", Status.NOT_INSTALLED, "FlashInfer is not installed")
