"""A bench without a GPU: implementations of given speeds, right or wrong, on a set clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from nwor_bench.microbench.bench import Bench, Replay
from nwor_bench.microbench.cases import L2, OURS, PEERS, Group, LaunchMode, Spec, bytes_moved
from nwor_bench.microbench.rows import Implementation, Implementations, Sample

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
    refused: Mapping[str, str] | None = None,
    throttled: Iterator[float] | None = None,
    cannot: frozenset[tuple[str, LaunchMode]] = frozenset(),
) -> Bench:
    """A bench whose peers are all there but for `refused`; `wrong` says whose check fails how."""

    def build(group: Group) -> Implementations:
        out = {n: why for n, why in (refused or {}).items() if n in PEERS[group.kernel]}
        implementations = [
            Implementation(
                name,
                28 if name.startswith("vllm") and group.kernel == "commit" else 1,
                bytes_moved(group, spec.shape),
                [lambda: None],
                lambda name=name: (wrong or {}).get(name, ""),
            )
            for name in (OURS, *PEERS[group.kernel])
            if name not in out
        ]
        return Implementations(tuple(implementations), out)

    stopwatch = FakeStopwatch(us or {OURS: 4.0, "vllm_cuda": 80.0, "copy": 2.0}, cannot)
    return Bench(spec, build, stopwatch, lambda: None if throttled is None else next(throttled))


NO_VLLM = {"vllm_cuda": "vLLM is not installed"}
