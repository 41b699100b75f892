"""Serve with the draft counts that were found: an open loop in the engine of the batch sizes.

A block is a trace of requests: for each measured batch size, the smallest first, requests arrive
(Poisson) so often that k = 0 would run about as many at a time. Every arm serves the same trace.
"""

import time
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from math import ceil
from random import Random
from statistics import fmean, median
from typing import Any

from nwor_bench.analysis.draft_rates import Worth
from nwor_bench.analysis.served import LINE, best_fixed
from nwor_bench.analysis.statistics import MIN_BLOCKS
from nwor_bench.engine.protocol import Engine, Sampling
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase
from nwor_bench.run.execute import Prepared

LOAD = 0.8
"""Share of a batch size at which k = 0 would run: a queue that only grows measures itself."""

TRACED = 2
"""Requests of a trace for each one of a batch size."""

LEAST_TOKENS = 8
"""Fewest output tokens of a request: fewer are mostly prefill."""


def serve_line(
    engine: Engine,
    prepared: Prepared,
    runs: Mapping[int, RunData],
    worth: Worth,
    seconds: float,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Rows of blocks and arms, for `served_ratios`; none, and a message, if there is no line to
    serve or no time for MIN_BLOCKS blocks.

    Args:
        prepared: the largest run.
        runs: by batch size.
        seconds: of all blocks.
    """
    arms = _arms(worth, max(runs))
    if arms is None:
        say("open loop: no draft count is shown to pay, so nothing was served")
        return []
    latencies = {size: _latency_s(run) for size, run in runs.items()}
    scenario = prepared.spec.scenario
    # The arrivals of a size take TRACED / LOAD of its latency, and the last requests one more.
    trace_s = TRACED / LOAD * sum(latencies.values()) + max(latencies.values())
    share = min(1.0, seconds / (MIN_BLOCKS * len(arms) * trace_s))
    tokens = int(scenario.max_new_tokens * share)
    if tokens < LEAST_TOKENS:
        needed = ceil(seconds / share * LEAST_TOKENS / scenario.max_new_tokens)
        say(f"open loop: left out, as {MIN_BLOCKS} blocks need {needed} s; write --serve {needed}s")
        return []
    known = dict.fromkeys(p for block in prepared.plan.blocks for p in block.prompts)
    texts = prepared.encode(tuple(known))
    sampling = Sampling(tokens, 0.0, 1.0, prepared.spec.seed, ignore_eos=True)
    began, rows, block = time.perf_counter(), [], 0
    while block < MIN_BLOCKS or (time.perf_counter() - began) * (1 + 1 / block) <= seconds:
        random = Random(f"{prepared.spec.seed}:serve:{block}")
        arrivals = _arrivals(random, {n: own * share for n, own in latencies.items()})
        prompts = list(islice(cycle(texts), block * len(arrivals), (block + 1) * len(arrivals)))
        for arm in random.sample(list(arms), len(arms)):
            served = engine.serve(prompts, arrivals, sampling, arms[arm])
            rows.append({"block": block, "arm": arm, "requests": len(arrivals),
                         "tokens": tokens * len(arrivals), "seconds": served.seconds,
                         "tpot_ms": fmean(served.tpot_ms)})  # fmt: skip
        block += 1
    say(f"open loop: {block} blocks of {len(arrivals)} requests of {tokens} tokens, "
        f"{time.perf_counter() - began:.0f} s")  # fmt: skip
    return sorted(rows, key=lambda row: row["arm"] != LINE)


def _arms(worth: Worth, largest: int) -> dict[str, list[list[int]]] | None:
    """Schedules by arm; None if k = 0 is the line, or the best fixed count is not known."""
    fixed = best_fixed(worth)
    if fixed is None or not any(worth.best.values()):
        return None
    others = {f"k = {k}": [[1, largest, k]] for k in (fixed, 0)}
    return {LINE: worth.schedule} | {
        arm: own for arm, own in others.items() if own != worth.schedule
    }


def _latency_s(run: RunData) -> float:
    """Median time of a batch at k = 0."""
    whole = (Phase.GATE, Phase.TIMED)
    return median(
        b.latency_ms / 1e3 for b in run.batches if b.phase in whole and b.cell.is_baseline
    )


def _arrivals(random: Random, latencies: Mapping[int, float]) -> list[float]:
    """When each request comes, in seconds, by the time that a request takes at each size."""
    now, times = 0.0, []
    for size in sorted(latencies):
        for _ in range(TRACED * size):
            now += random.expovariate(LOAD * size / latencies[size])
            times.append(now)
    return times
