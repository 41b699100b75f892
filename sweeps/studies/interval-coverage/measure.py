"""How often does each interval that nwor-bench prints include the truth, and who is misjudged?

    python sweeps/studies/interval-coverage/measure.py [--runs 1000] [--only TEXT] [--output FOLDER]

Simulated runs in which nothing differs: every true ratio is 1. Each line of coverage.csv is one
interval under one condition, by the project's own functions: the share of runs whose interval
includes 1 (of several draft counts: all of theirs), and the share with a false verdict: FASTER or
SLOWER of anything, or a line with drafts. `ours` is 0 for other ways to make an interval, which
nothing prints.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd
from scipy import stats
from simulated_noise import (
    BLOCKS,
    NOISES,
    SIGMA,
    Blocks,
    Logs,
    Sample,
    Windows,
    all_cells,
    autoregression,
    correlated,
    neighbours_t3,
)
from simulated_runs import COUNTS, EngineNoise, Texts, cell, interleaved, worth_of_engines

from nwor_bench.analysis.changes import token_time_change
from nwor_bench.analysis.draft_rates import AtSize, Rate, SpanTokens, Worth, worth_at
from nwor_bench.analysis.paired import PairedTimes
from nwor_bench.analysis.parity.acceptance import Acceptance, acceptance_outside
from nwor_bench.analysis.throughput import rate_of_blocks, rate_of_groups
from nwor_bench.analysis.verdicts import verdict
from nwor_bench.analysis.worth import worth_of
from nwor_bench.live.watch import WidthRule
from nwor_bench.records.types import Verdict
from nwor_bench.records.window_order import SERVER_RUN_LENGTHS
from nwor_bench.run.microbench.cases import OURS
from nwor_bench.run.microbench.report import half_widths
from nwor_bench.stats import robust
from nwor_bench.stats.interval import Interval, quotient
from nwor_bench.stats.multiple import ratio_at_once
from nwor_bench.stats.paired import paired_ratio
from nwor_bench.stats.robust import (
    from_ends,
    log_tokens,
    mean_location,
    robust_location,
)
from nwor_bench.workload.stopping import FIRST_LOOK, StoppingRule

Rng = np.random.Generator
DIFFERS = (Verdict.FASTER, Verdict.SLOWER)

SCALE = 0.02
"""Spread of a block's log ratio."""


class Outcome(NamedTuple):
    """One simulated run."""

    held: bool
    """The interval includes the truth."""
    false: bool | None = None
    """The verdict is false; None without one."""
    half: float | None = None
    """Half of its interval, as a log ratio."""


@dataclass(frozen=True)
class Case:
    """One interval under one condition."""

    interval: str
    condition: str
    run: Callable[[Rng], Outcome]
    share: float = 1.0
    """Share of the runs asked for: slow ones have fewer."""
    ours: bool = True


def rows(
    interval: str,
    run: Callable[..., Outcome],
    conditions: Mapping[str, Mapping[str, Any]],
    share: float = 1.0,
    ours: bool = True,
) -> Iterator[Case]:
    """A case for each condition, which has the arguments of `run`."""
    for condition, arguments in conditions.items():
        yield Case(interval, condition, partial(run, **arguments), share, ours)


def judged(found: Interval, **how: Any) -> Outcome:
    """The interval includes 1; `verdict` says that something differs."""
    half = log(found.high / found.low) / 2
    return Outcome(found.holds(1), verdict(found, **how) in DIFFERS, half)


def judged_together(ratios: Sequence[Interval | None], false: bool) -> Outcome:
    """Several intervals that are to hold at once."""
    known = [ratio for ratio in ratios if ratio is not None]
    assert len(known) == len(ratios), "an interval is missing"
    half = float(np.mean([ratio.ln().half_width for ratio in known]))
    return Outcome(all(ratio.holds(1) for ratio in known), false, half)


def of_logs(logs: Logs) -> Interval:
    """Whole batches: the blocks' interval."""
    return paired_ratio(np.exp(logs).tolist(), [1.0] * len(logs))


Locate = Callable[[Sequence[float]], Interval | None]


def of_groups(values: Logs, locate: Locate = robust_location) -> Interval:
    """Interleaved windows: the groups' interval."""
    found = locate(values.tolist())
    assert found is not None
    return found.exp()


# A sweep's whole batches.


def blocks_run(rng: Rng, noise: Blocks, blocks: int) -> Outcome:
    """Beside an A/A arm with the same noise."""
    aa, own = (SCALE * noise(rng, 1, blocks)[0] for _ in range(2))
    return judged(of_logs(own), noise_floor=of_logs(aa).distance)


def stopped_run(rng: Rng, on_verdict: bool) -> Outcome:
    """At the first narrow look; `on_verdict`: at the first look whose interval excludes 1."""
    rule = StoppingRule(5, 100, ci_width=0.4 * SCALE)
    logs = SCALE * SWEEP(rng, 1, rule.max_blocks)[0]
    for blocks in (*rule.looks, rule.max_blocks):
        found = of_logs(logs[:blocks])
        excludes = not found.holds(1)
        if excludes if on_verdict else rule.stop(blocks, [found.half_width], 0, 0):
            break
    return judged(found)


def bootstrap_run(rng: Rng, noise: Blocks, blocks: int) -> Outcome:
    """The percentile bootstrap over blocks."""
    found = stats.bootstrap(
        (noise(rng, 1, blocks)[0],), np.mean, n_resamples=999, method="percentile", rng=rng
    ).confidence_interval
    return Outcome(bool(found.low <= 0 <= found.high))


def fastest_run(rng: Rng, blocks: int, together: int) -> Outcome:
    """The fastest of six equal cells."""
    cells = [of_logs(SCALE * logs) for logs in all_cells(rng, 1, blocks)[0]]
    best = ratio_at_once(min(cells, key=lambda each: each.value), together)
    return Outcome(best.holds(1), half=log(best.high / best.low) / 2)


DRIFTS = "a sweep that drifts, heavy tails"
SWEEP = BLOCKS[DRIFTS]


def whole_batches() -> Iterator[Case]:
    """Ratios of whole batches."""
    name, both = "sweep: ratio of whole batches", (5, 60)
    each = [(noise, blocks) for noise in BLOCKS for blocks in (3, 5, 10, 60)]
    usual = {f"{noise}; {n} blocks": {"noise": BLOCKS[noise], "blocks": n} for noise, n in each}
    yield from rows(name, blocks_run, usual)
    yield from rows(name, stopped_run, {"stopped on its width": {"on_verdict": False}}, 0.4)
    six = {f"fastest of six; {n} blocks": {"blocks": n, "together": 6} for n in both}
    yield from rows("sweep: headline", fastest_run, six, 0.5)
    alone = {f"fastest of six; {n} blocks": {"blocks": n, "together": 1} for n in both}
    yield from rows("sweep: headline by the cell's own interval", fastest_run, alone, 0.5, False)
    yield from rows(name, stopped_run, {"stopped on a verdict": {"on_verdict": True}}, 0.4, False)
    heavy = {f"{DRIFTS}; {n} blocks": {"noise": SWEEP, "blocks": n} for n in (5, 10)}
    yield from rows("percentile bootstrap of blocks", bootstrap_run, heavy, 0.5, False)


# A sweep's interleaved windows.


def groups_run(rng: Rng, noise: str, groups: int, locate: Locate = robust_location) -> Outcome:
    """Beside an A/A arm with the same noise."""
    aa, own = (of_groups(NOISES[noise](rng, groups), locate) for _ in range(2))
    return judged(own, noise_floor=aa.distance, small_counts=True)


def with_variance(values: Sequence[float], variance: Any) -> Interval | None:
    """Huber's location with another variance of its scores."""
    with patch.object(robust, "long_run_variance", variance):
        return robust_location(values)


def _independent(scores: Logs) -> tuple[float, float]:
    return float(scores.var(ddof=1)), len(scores) - 1


def _newey_west(scores: Logs) -> tuple[float, float]:
    """Bartlett's kernel with Newey and West's automatic bandwidth (1994, section 3); degrees of
    freedom: n over 2/3 of the bandwidth (Priestley 1981, section 6.2.4)."""
    count = len(scores)
    around = scores - scores.mean()
    lag = [float((around[k:] * around[: count - k]).sum()) / count for k in range(count // 2)]
    near = range(int(4 * (count / 100) ** (2 / 9)) + 1)
    total = lag[0] + 2 * sum(lag[k] for k in near[1:])
    slope = 2 * sum(k * lag[k] for k in near)
    rate = 1.1447 * abs(slope / total) ** (2 / 3) if total > 0 else 0.0
    width = min(int(rate * count ** (1 / 3)) + 1, count // 4) + 1
    found = lag[0] + 2 * sum((1 - k / width) * lag[k] for k in range(1, width))
    return max(found, 0.0) * count / (count - 1), min(count - 1, 1.5 * count / width)


def groups_of_windows() -> Iterator[Case]:
    """Ratios of neighbouring windows: step, work, A/A, and each part of a split."""
    each = [(noise, groups) for noise in NOISES for groups in (10, 50, 200)]
    usual = {f"{noise}; {n} groups": {"noise": noise, "groups": n} for noise, n in each}
    yield from rows("sweep: interleaved ratio (step, work, A/A, split)", groups_run, usual)
    means = {
        f"{noise}; 200 groups": {"noise": noise, "groups": 200, "locate": mean_location}
        for noise in ("windows t, 2 degrees", "clock jumps")
    }
    yield from rows("sweep: mean over windows", groups_run, means)
    ways = {"Newey and West": _newey_west, "independent groups": _independent}
    for way, variance in ways.items():
        others = {
            f"{noise}; 50 groups": {
                "noise": noise, "groups": 50, "locate": partial(with_variance, variance=variance),
            }
            for noise in ("groups correlate by 0.3", "groups correlate by 0.6")
        }  # fmt: skip
        yield from rows(f"variance by {way}", groups_run, others, 0.5, False)


@dataclass
class _Group:
    """Part of a `Group` that tokens/s need."""

    tokens: float
    pace: float
    device: None = None


def token_groups_run(rng: Rng, requests: int, groups: int) -> Outcome:
    """A B B A in runs of two; each batch of 20 groups has requests of its own."""
    ease = rng.beta(6, 3, (groups // 20 + 1, requests)).repeat(20, axis=0)[:groups]
    drafts = rng.random((groups, 8, requests, 4)) < ease[:, None, :, None]
    tokens = requests + np.cumprod(drafts, axis=3).sum(axis=(2, 3))
    treated = np.array([0, 0, 1, 1, 1, 1, 0, 0], dtype=bool)
    logs = np.log(tokens[:, treated].mean(axis=1) / tokens[:, ~treated].mean(axis=1))
    found: Any = [_Group(own, 3 * SIGMA * rng.standard_normal()) for own in logs.tolist()]
    rate = rate_of_groups(found)
    assert rate is not None
    return judged(rate.ratio, small_counts=True)


def token_blocks_run(rng: Rng, blocks: int) -> Outcome:
    """Both tokens and times of blocks scatter."""
    tokens, times = (SCALE * SWEEP(rng, 2, blocks)).tolist()
    logs = tuple(tokens), tuple(times)
    rate = rate_of_blocks(PairedTimes("window_ms", tuple(range(blocks)), (), (), *logs))
    assert rate is not None
    return judged(rate.ratio)


def acceptance_run(rng: Rng, fork: bool) -> Outcome:
    """64 requests of 24 windows in two cells; `fork`: their texts differ from the first token on,
    as the gate finds them to."""
    sides: list[Any] = []
    ease = rng.beta(6, 3, (2, 64))
    for own in (ease[0], ease[1] if fork else ease[0]):
        taken = np.cumprod(rng.random((64, 24, 4)) < own[:, None, None], axis=2).sum(axis=(0, 1))
        sides += [tuple(taken.tolist()), 64 * 24]
    found = Acceptance(*sides, diverged=(1,) * 64 if fork else (), tokens=64)
    outside = acceptance_outside(found, alpha=0.05)
    return Outcome(outside is None, outside is not None)


def tokens_and_acceptance() -> Iterator[Case]:
    """Tokens/s of cells whose acceptance differs by chance; acceptance by position, whose level is
    1e-4 in a gate's batch and 1e-6 in a run."""
    each = [(requests, groups) for requests in (8, 64) for groups in (20, 50)]
    groups = {f"{r} requests; {n} groups": {"requests": r, "groups": n} for r, n in each}
    yield from rows("sweep: tokens/s, TPOT (interleaved)", token_groups_run, groups, 0.5)
    blocks = {f"{DRIFTS}; {n} blocks": {"blocks": n} for n in (5, 20)}
    yield from rows("sweep: tokens/s, TPOT (whole batches)", token_blocks_run, blocks)
    texts = {"equal texts": {"fork": False}, "every text forks": {"fork": True}}
    yield from rows("acceptance by position, at a level of 5 %", acceptance_run, texts)


# Draft counts.


def in_all(rates: Sequence[Rate], line: bool) -> Outcome:
    """Every count's interval includes 1; a verdict is false, or a line with drafts."""
    false = line or any(rate.verdict in DIFFERS for rate in rates)
    return judged_together([rate.ratio for rate in rates], false)


def of_worth(found: Worth) -> Outcome:
    """Tokens/s of all counts over k = 0."""
    return in_all(found.rates, any(found.best.values()))


def group_noise(
    rng: Rng, groups: int, noise: float = 0.05, noisy: int = 0, r: float = 0.0
) -> Callable[[int | None], Logs]:
    """Noise of a draft count's groups: `noisy` is five times as noisy as the others."""

    def of(count: int | None) -> Logs:
        factor = 5 if count and count == noisy else 1
        return noise * factor * autoregression(rng.standard_normal(groups), r)

    return of


GROUPS: dict[str, dict[str, Any]] = {
    "50 groups": {"groups": 50},
    "12 groups": {"groups": 12},
    "3 groups": {"groups": 3},
    "k = 4 five times as noisy; 5 groups": {"groups": 5, "noise": 0.02, "noisy": 4},
    "k = 4 five times as noisy; 20 groups": {"groups": 20, "noise": 0.02, "noisy": 4},
    "groups correlate by 0.4; 20 groups": {"groups": 20, "r": 0.4},
    "groups correlate by 0.7; 20 groups": {"groups": 20, "r": 0.7},
}

TEXTS = {
    "40 prompts": Texts(),
    "40 prompts at 4 batch sizes, half of the texts fork": Texts(batches=4, forks=0.5),
    "12 prompts at 4 batch sizes, half of the texts fork": Texts(12, batches=4, forks=0.5),
    "12 prompts at 4 batch sizes, all texts fork": Texts(12, batches=4, forks=1.0),
    "5 prompts": Texts(5),
}
"""Beside them the times are known to 0.1 %."""


def worth_run(rng: Rng, texts: Texts, **noise: Any) -> Outcome:
    """Time and tokens of each draft count jointly."""
    return of_worth(worth_of([interleaved(rng, group_noise(rng, **noise), texts)]))


def staged_run(rng: Rng, **noise: Any) -> Outcome:
    """Each count staged over itself in mode off."""
    found = worth_of([interleaved(rng, group_noise(rng, **noise), Texts(5), staged=True)])
    false = any(rate.stage_verdict in DIFFERS for rate in found.rates)
    return judged_together([rate.staged for rate in found.rates], false)


ENGINES = {
    "3 blocks": EngineNoise(3),
    "5 blocks": EngineNoise(5),
    "20 blocks": EngineNoise(20),
    "k = 4 five times as noisy; 5 blocks": EngineNoise(5, of_last=0.05),
    "k = 4 five times as noisy; 20 blocks": EngineNoise(20, of_last=0.05),
    "blocks correlate by 0.4; 8 blocks": EngineNoise(8, drift=0.4),
    "blocks correlate by 0.4; 20 blocks": EngineNoise(20, drift=0.4),
    "blocks correlate by 0.7; 8 blocks": EngineNoise(8, drift=0.7),
    "blocks correlate by 0.7; 20 blocks": EngineNoise(20, drift=0.7),
    "engines 1 % apart; 8 blocks": EngineNoise(8, engines=0.01),
    "engines 1 % apart; 20 blocks": EngineNoise(20, engines=0.01),
    "engines 2 % apart; 8 blocks": EngineNoise(8, engines=0.02),
    "engines 5 % apart; 8 blocks": EngineNoise(8, engines=0.05),
}


def engines_run(rng: Rng, noise: EngineNoise) -> Outcome:
    """An engine for each count, and one more without drafts."""
    return of_worth(worth_of_engines(noise, int(rng.integers(1 << 32))))


def draft_counts() -> Iterator[Case]:
    """`worth`: interleaved, staged, and with an engine for each count."""
    name = "worth: tokens/s over k = 0, all k"
    times = {noise: {"texts": Texts(), **how} for noise, how in GROUPS.items()}
    yield from rows(name, worth_run, times, 0.3)
    known = {what: {"texts": t, "groups": 50, "noise": 0.005} for what, t in TEXTS.items()}
    yield from rows(name, worth_run, known, 0.3)
    yield from rows("worth: staged over mode off, all k", staged_run, GROUPS, 0.5)
    engines = {what: {"noise": noise} for what, noise in ENGINES.items()}
    yield from rows("worth --engines: tokens/s over k = 0, all k", engines_run, engines)


# A server.


def live_run(rng: Rng, sample: Sample, width: float) -> Outcome:
    """Read every 20 groups until the command's own rule ends."""
    values, rule = sample(rng, 4000), WidthRule(width)
    for groups in range(20, len(values) + 1, 20):
        looks = rule.end_at is None and groups >= rule.next_look
        if rule.is_met(groups, of_groups(values[:groups]).half_width if looks else None):
            break
    return judged(of_groups(values[:groups]))


def live_drafts_run(rng: Rng, groups: int, lasts: int) -> Outcome:
    """Eight requests at a time, each for `lasts` spans of 12 windows at a count, that start one
    after the other."""
    request = (np.arange(groups)[:, None] + np.arange(8) * lasts // 8) // lasts

    def read(values: Logs) -> Interval:
        """A reading, as the command takes it from /metrics."""
        shown = of_groups(values)
        return from_ends(shown.value, shown.low, shown.high, len(values)).ln()

    times: dict[int | None, Interval] = {None: read(correlated(0.0)(rng, groups))}
    tokens: dict[int, Interval] = {}
    for k in COUNTS:
        chances = np.cumprod([(6 + n) / (9 + n) for n in range(k)])  # of k drafts in a row
        times[k] = read(np.log1p(chances.sum()) + correlated(0.0)(rng, groups))
        ease = rng.beta(6, 3, (int(request.max()) + 1, 8))[request, np.arange(8)]
        drafts = rng.random((groups, 12, 8, k)) < ease[:, None, :, None]
        found = log_tokens(np.cumprod(drafts, axis=3).sum(axis=(1, 2, 3)), [96.0] * groups)
        assert found is not None
        tokens[k] = found
    return in_all(worth_at([AtSize(8, 5, times, SpanTokens(tokens))], COUNTS, 0).rates, line=False)


def server() -> Iterator[Case]:
    """`live` ends on the interval's width, which is that of the median run at 100 groups."""
    chosen = "independent windows", "clock jumps", "groups correlate by 0.6", "batches of 20 differ"
    ends = {}
    for noise in chosen:
        sample, rng = NOISES[noise], np.random.default_rng(100)
        if isinstance(sample, Windows):  # all runs are of one length
            sample = replace(sample, lengths=SERVER_RUN_LENGTHS)
        widths = [of_groups(sample(rng, 100)).half_width for _ in range(200)]
        ends[noise] = {"sample": sample, "width": float(np.median(widths))}
    yield from rows("live: ratio, ended on its width", live_run, ends, 0.5)
    drafts = {f"{n} groups and spans": {"groups": n, "lasts": 1} for n in (20, 50, 200)}
    drafts |= {f"requests last {n} spans; 200": {"groups": 200, "lasts": n} for n in (5, 20)}
    yield from rows("live: draft counts, all k", live_drafts_run, drafts, 0.3)


# Two runs, and kernels.


def change_run(rng: Rng, noise: str, groups: int) -> Outcome:
    """Change of an interleaved ratio between two runs, which keep its bounds; A/A changes too."""
    runs = [of_groups(NOISES[noise](rng, groups)) for _ in range(4)]
    base, new, aa_base, aa_new = (from_ends(r.value, r.low, r.high, groups) for r in runs)
    aa = quotient(aa_new, aa_base)
    return judged(quotient(new, base), noise_floor=aa.distance)


def block_change_run(rng: Rng, blocks: int, apart: float) -> Outcome:
    """Paired by block; with `apart` the two processes differ as a whole, A/A with them."""
    aa, own = SCALE * SWEEP(rng, 2, blocks) + apart * rng.standard_normal()
    return judged(of_logs(own), noise_floor=of_logs(aa).distance)


def count_change_run(rng: Rng, **noise: Any) -> Outcome:
    """Time per token of four drafts over none, in two runs of different texts."""
    base, new = (interleaved(rng, group_noise(rng, **noise), Texts(20)) for _ in range(2))
    change = token_time_change(base, new, cell(4))
    assert change is not None
    return judged(change.ratio)


def kernels_run(rng: Rng, r: float) -> Outcome:
    """A kernel's time over ours, paired by round and ended on the width."""
    rule = StoppingRule(FIRST_LOOK, 200, ci_width=0.005)
    shared = 0.05 * autoregression(rng.standard_normal(200), 0.9)
    logs = {name: shared + SIGMA * neighbours_t3(rng, 1, 200, r=r)[0] for name in (OURS, "other")}
    for rounds in (*rule.looks, rule.max_blocks):
        times = {name: np.exp(own[:rounds]).tolist() for name, own in logs.items()}
        if rule.stop(rounds, half_widths(times), 0.0, 0.0):
            break
    return judged(paired_ratio(times["other"], times[OURS]))


def changes_and_kernels() -> Iterator[Case]:
    """`compare` and `kernels`."""
    groups = {
        f"{noise}; 50 groups": {"noise": noise, "groups": 50}
        for noise in ("independent windows", "groups correlate by 0.6")
    }
    yield from rows("compare: change of an interleaved ratio", change_run, groups)
    ratios = {f"{DRIFTS}; {n} blocks": {"blocks": n, "apart": 0.0} for n in (5, 20)}
    yield from rows("compare: change of a ratio of whole batches", block_change_run, ratios)
    times = {f"processes 1 % apart; {n} blocks": {"blocks": n, "apart": 0.01} for n in (5, 20)}
    yield from rows("compare: change of a time (--decide-by time)", block_change_run, times)
    counts = {name: GROUPS[name] for name in ("12 groups", "3 groups")}
    yield from rows("compare: change of a draft count", count_change_run, counts, 0.3)
    rounds = {"clock drifts, heavy tails": {"r": 0.0}, "rounds correlate by 0.3": {"r": 0.3}}
    yield from rows("kernels: time over ours, ended on its width", kernels_run, rounds, 0.5)


def cases() -> list[Case]:
    """All of them, in the page's order."""
    families = (
        whole_batches, groups_of_windows, tokens_and_acceptance, draft_counts, server,
        changes_and_kernels,
    )  # fmt: skip
    return sorted((case for family in families for case in family()), key=lambda c: not c.ours)


def simulate(case: Case, runs: int, seed: int = 0) -> dict[str, object]:
    """A line of the CSV."""
    number = max(round(runs * case.share), 1)
    key = [seed, *f"{case.interval} {case.condition}".encode()]
    found = [case.run(np.random.default_rng([*key, n])) for n in range(number)]
    held = float(np.mean([own.held for own in found]))
    false = [own.false for own in found if own.false is not None]
    halves = [own.half for own in found if own.half is not None]
    return {
        "interval": case.interval,
        "condition": case.condition,
        "claimed": 0.95,
        "runs": number,
        "covered": held,
        "error": (max(held * (1 - held), 1 / number) / number) ** 0.5,
        "false_verdicts": float(np.mean(false)) if false else None,
        "half_width": float(np.median(halves)) if halves else None,
        "ours": int(case.ours),
    }


def main() -> None:
    """Simulate; write the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="of a line; slow lines have fewer")
    parser.add_argument(
        "--only", default="", help="only lines with this in their names; others stay"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    table, key, every = args.output / "coverage.csv", ["interval", "condition"], cases()
    chosen = [case for case in every if args.only in f"{case.interval} {case.condition}"]
    lines = pd.DataFrame(simulate(case, args.runs) for case in chosen).set_index(key)
    if args.only:
        kept = pd.read_csv(table).set_index(key)
        lines = pd.concat([kept.drop(lines.index, errors="ignore"), lines])
    order = [names for c in every if (names := (c.interval, c.condition)) in lines.index]
    lines.loc[order].to_csv(table, float_format="%.4g")


if __name__ == "__main__":
    main()
