"""A bench without a GPU: contenders of given speeds, right or wrong, on a clock with noise."""

from collections.abc import Iterator, Mapping, Sequence
from random import Random

from nwor_bench.run.microbench.bench import Bench, Call, Contender, Replay
from nwor_bench.run.microbench.cases import ONE_ROW, OURS, PEER, InputGroup, Spec

BACKENDS = ("nwor_staged", "triton")
FACTS = {"gpu": "Fake GPU", "l2_bytes": 60 << 20, "copy_gb_per_s": 4000.0}
BYTES = 4_000_000


class Clock:
    """Times calls, which are given by name, as `us[name]`; `said`: each one's times."""

    def __init__(self, us: Mapping[str, float], cannot: str = ""):
        self.us, self.cannot, self._noise = us, cannot, Random(7)
        self.said: dict[str, list[float]] = {}

    def __call__(self, calls: Sequence[Call]) -> Replay:
        name = str(calls[0]())
        if name == self.cannot:
            raise RuntimeError("cannot be captured\nsecond line")

        def replay() -> float:
            us = self.us.get(name, 5.0) * self._noise.uniform(0.999, 1.001)
            self.said.setdefault(name, []).append(us)
            return us

        return replay


def make_bench(
    spec: Spec,
    us: Mapping[str, float] | None = None,
    *,
    wrong: Mapping[str, str] | None = None,
    missing: Mapping[str, Exception] | None = None,
    throttled: Iterator[float] | None = None,
    cannot: str = "",
) -> Bench:
    """A bench of ours and one peer; of `attention` ours and Triton, each at one row too.

    `wrong`: whose check fails how; `missing`: who is not installed; `cannot`: who is not captured.
    """

    def contender(name: str, one: Contender | None = None) -> Contender:
        def bind() -> list[Call]:
            if missing and name in missing:
                raise missing[name]
            return [lambda: name]

        return Contender(name, BYTES, bind, lambda call: (wrong or {}).get(name, ""), one)

    def make(group: InputGroup) -> list[Contender]:
        if group.kernel == "attention":
            ones = {name: contender(f"{name}{ONE_ROW}") for name in BACKENDS}
            return [contender(*pair) for pair in ones.items()]
        return [contender(name) for name in (OURS, PEER[group.kernel])]

    clock = Clock(us or {OURS: 4.0, "vllm_cuda": 80.0}, cannot)
    return Bench(spec, make, clock, lambda: None if throttled is None else next(throttled))
