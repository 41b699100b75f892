"""A bench without a GPU: implementations of given speeds, right or wrong, on a set clock."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from nwor_bench.microbench.bench import Bench, Replay
from nwor_bench.microbench.cases import OURS, PEER, Group, Spec, bytes_moved
from nwor_bench.microbench.rows import Implementation, Implementations

FACTS = {"gpu": "Fake GPU", "l2_bytes": 60 << 20, "copy_gb_per_s": 4000.0}


@dataclass
class FakeStopwatch:
    """Replays that take `us[name]` times a drift that all share within a round."""

    us: Mapping[str, float]
    cannot: frozenset[str] = frozenset()
    replayed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise = Random(7)

    def prepare(self, implementation: Implementation) -> Replay:
        if implementation.name in self.cannot:
            raise RuntimeError("cannot be captured\nsecond line")

        def replay() -> float:
            self.replayed.append(implementation.name)
            return self.us.get(implementation.name, 5.0) * self._noise.uniform(0.999, 1.001)

        return replay


def make_bench(
    spec: Spec,
    us: Mapping[str, float] | None = None,
    *,
    wrong: Mapping[str, str] | None = None,
    refused: Mapping[str, str] | None = None,
    throttled: Iterator[float] | None = None,
    cannot: frozenset[str] = frozenset(),
) -> Bench:
    """A bench whose peers are all there but for `refused`; `wrong` says whose check fails how."""

    def build(group: Group) -> Implementations:
        out = {n: why for n, why in (refused or {}).items() if n == PEER[group.kernel]}
        implementations = [
            Implementation(
                name,
                28 if name.startswith("vllm") and group.kernel == "commit" else 1,
                bytes_moved(group, spec.shape),
                [lambda: None],
                lambda name=name: (wrong or {}).get(name, ""),
            )
            for name in (OURS, PEER[group.kernel])
            if name not in out
        ]
        return Implementations(tuple(implementations), out)

    stopwatch = FakeStopwatch(us or {OURS: 4.0, "vllm_cuda": 80.0}, cannot)
    return Bench(spec, build, stopwatch, lambda: None if throttled is None else next(throttled))


NO_VLLM = {"vllm_cuda": "vLLM is not installed"}
