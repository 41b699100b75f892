"""Runs of draft counts in which no count pays: k drafts give as many tokens more as they take time.

Records of the parts that the analysis reads, so that `worth_of` and what it calls are the real
ones. Every true ratio of tokens per second is 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.stats import beta
from simulated_noise import Logs

from nwor_bench.analysis.draft_rates import AtSize, Worth, worth_at
from nwor_bench.analysis.engine_times import block_times
from nwor_bench.analysis.groups import Pair
from nwor_bench.analysis.worth import Measured
from nwor_bench.records.cell import AA, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.header import PairFacts, StoredSpec
from nwor_bench.records.types import Phase
from nwor_bench.stats.interval import Interval

COUNTS = (1, 2, 3, 4)
EASE = (6.0, 3.0)
"""Parameters of the beta distribution of a text's chance that a draft is accepted."""
LENGTH = 64
"""Tokens of a request behind its first one."""


def accepted_of(rng: np.random.Generator, ease: float, k: int) -> tuple[int, int]:
    """Windows that a request takes, and the drafts accepted in them, none beyond its end."""
    taken = np.cumprod(rng.random((LENGTH, k)) < ease, axis=1).sum(axis=1)
    windows = int(np.searchsorted(np.cumsum(1 + taken), LENGTH)) + 1
    return windows, LENGTH - windows


@cache
def log_tokens_of(k: int) -> float:
    """Log tokens of a window over all texts: a request's tokens over its expected windows."""
    ease = beta(*EASE).ppf((np.arange(2000) + 0.5) / 2000)
    chances = [*(ease**taken * (1 - ease) for taken in range(k)), ease**k]
    windows = [np.zeros(len(ease))]  # by the tokens that are left
    for left in range(1, LENGTH + 1):
        after = (windows[max(left - 1 - taken, 0)] for taken in range(k + 1))
        windows.append(1 + sum(map(np.multiply, chances, after)))
    return log(LENGTH / float(np.mean(windows[LENGTH])))


def cell(count: int | None, staged: bool = False) -> Cell:
    """The cell of a draft count; None: the A/A arm."""
    arm = AA if count is None else Drafts(count)
    own = Cell("tiny", NworMode.OFF, ScvMode.OFF, arm)
    return replace(own, nwor_mode=NworMode.STAGE, scv_mode=ScvMode.GRAPH) if staged else own


@dataclass(frozen=True)
class Texts:
    """Whole batches of every draft count."""

    prompts: int = 40
    batches: int = 1
    """Batches of the same prompts at other batch sizes."""
    forks: float = 0.0
    """Chance that a prompt's output differs from that of the first batch (bf16)."""


RequestRow = tuple[str, str, tuple[int, int]]
"""A request's prompt, the digest of its output, and its windows with the drafts accepted."""


def whole_batches(rng: np.random.Generator, texts: Texts) -> list[Any]:
    """A gate's batches of all counts."""
    eases = rng.beta(*EASE, texts.prompts)
    first = [{k: accepted_of(rng, ease, k) for k in COUNTS} for ease in eases]
    batches = []
    for number in range(texts.batches):
        forked = rng.random(texts.prompts) < (texts.forks if number else 0.0)
        own = [
            ({k: accepted_of(rng, ease, k) for k in COUNTS} if fork else same, number * int(fork))
            for ease, fork, same in zip(eases, forked, first, strict=True)
        ]
        for k in (0, *COUNTS):
            rows: list[RequestRow] = [
                (f"{prompt}", f"{prompt}-{fork}", taken[k] if k else (0, 0))
                for prompt, (taken, fork) in enumerate(own)
            ]
            batches.append(batch(k, number, rows))
    return batches


def batch(count: int, block: int, rows: Sequence[RequestRow]) -> Any:
    """The part of a `BatchRecord` that the analysis of draft counts reads, and the prompts."""
    prompts, digests, acceptance = zip(*rows, strict=True)
    return SimpleNamespace(
        cell=cell(count), phase=Phase.GATE, block=block, batch=0, requests=len(rows),
        prompts=prompts, token_digests=digests, request_acceptance=acceptance,
        output_tokens=(1 + LENGTH) * len(rows),
        request_tokens=tuple((1 + (w + a or LENGTH), a) for w, a in acceptance),
    )  # fmt: skip


def interleaved(
    rng: np.random.Generator,
    groups: Callable[[int | None], Logs],
    texts: Texts,
    staged: bool = False,
) -> Measured:
    """A run whose draft counts alternated.

    Args:
        groups: log noise of the groups of a draft count, None being k = 0 against itself.
        staged: each count alternated with itself staged too.
    """
    effects = [_effect(cell(0), cell(None), groups(None))]
    for k in COUNTS:
        effects.append(_effect(cell(0), cell(k), log_tokens_of(k) + groups(k)))
        if staged:
            effects.append(_effect(cell(k), cell(k, staged=True), groups(k)))
    return Measured(_run(whole_batches(rng, texts)), effects)  # type: ignore[arg-type]


def _effect(reference: Cell, treated: Cell, logs: Logs) -> Any:
    groups = [SimpleNamespace(num_reqs=8, host=value, device=None) for value in logs]
    return SimpleNamespace(pair=Pair(reference, treated), clock="wall_ms", groups=groups)


def _run(batches: list[Any]) -> Any:
    plan = {each.block: SimpleNamespace(block=each.block, prompt_ids=each.prompts)
            for each in batches}  # fmt: skip
    header = SimpleNamespace(
        scenario={"requests": 8}, spec=StoredSpec(), pair=PairFacts(),
        blocks=tuple(plan.values()),
    )  # fmt: skip
    finished = frozenset((each.phase, each.block) for each in batches)
    return SimpleNamespace(batches=batches, header=header, finished=finished, windows=(), events=())


@dataclass(frozen=True)
class EngineNoise:
    """What makes times of steps differ, as fractions.

    In every block all counts run, with what a block has in common, a scatter of each count, and
    lasting offsets of the engines.
    """

    blocks: int = 8
    scatter: float = 0.01
    of_last: float = 0.01
    """Scatter of the largest count."""
    drift: float = 0.0
    """Autocorrelation of each engine's scatter from block to block."""
    engines: float = 0.0
    """Lasting differences between engines."""

    def logs(self, rng: np.random.Generator) -> dict[int | None, list[float]]:
        """Log time of a step by draft count and block; None: the A/A engine."""
        shared = rng.normal(0, 0.05, self.blocks)
        found = {}
        for count in (None, 0, *COUNTS):
            scatter = self.of_last if count == COUNTS[-1] else self.scatter
            own, last = [], rng.normal(0, scatter)
            for _ in range(self.blocks):
                own.append(last)
                last = self.drift * last + rng.normal(0, scatter * (1 - self.drift**2) ** 0.5)
            found[count] = list(shared + own + rng.normal(0, self.engines))
        return found


class OneToken:
    """Tokens that are the same at every draft count, and known."""

    def mean(self, k: int) -> float:
        """Tokens of a request in a window."""
        return 1.0

    def difference(self, k: int, other: int) -> Interval:
        """No difference."""
        return Interval.of(0.0, 0.0, 1, 20)


def run_of_engines(logs: Mapping[int | None, Sequence[float]]) -> Any:
    """A run with these times of steps, as far as `block_times` reads it."""
    batches = [
        SimpleNamespace(
            phase=Phase.TIMED, block=block, cell=SimpleNamespace(drafts=count), requests=1,
            request_times=SimpleNamespace(tpot_ms=[exp(time)]), request_acceptance=((10, 0),),
            request_tokens=((11, 0),), output_tokens=11,
        )
        for count, own in logs.items()
        for block, time in enumerate(own)
    ]  # fmt: skip
    finished = {(Phase.TIMED, batch.block) for batch in batches}
    header = SimpleNamespace(pair=SimpleNamespace(method="mtp"), spec=StoredSpec(engines=True))
    return SimpleNamespace(batches=batches, finished=finished, header=header)


def worth_of_engines(noise: EngineNoise, seed: int) -> Worth:
    """What `worth --engines` says of one simulated run."""
    times = block_times(run_of_engines(noise.logs(np.random.default_rng(seed))))
    return worth_at([AtSize(8, 8, times, OneToken())], COUNTS, 20)
