"""Warm-up: batches of off x off until their window times are steady."""

from collections.abc import Callable
from statistics import fmean

from nwor_bench.analysis.trend import not_steady
from nwor_bench.records.header import WarmupFacts
from nwor_bench.run.batch import RanBatch
from nwor_bench.run.budget import Budget
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK


def warm_up(run: Callable[[], RanBatch], least: int, most: int, budget: Budget) -> WarmupFacts:
    """Run `least` to `most` batches; in between, until their times are steady or time is short.

    Args:
        run: runs one batch of off x off.
        least: fewest batches.
        most: most batches.
        budget: the run's; warm-up may take a share of it.
    """
    times: list[float] = []
    cut = ""
    while len(times) < most:
        if len(times) >= least and not_steady(times) is None:
            break
        if len(times) >= least and not budget.has_room_to_warm_up():
            cut = "; --time-budget left no room for more"
            break
        batch = run()
        walls = [window.wall_ms for window in batch.windows if window.wall_ms is not None]
        times.append(fmean(walls) if walls else batch.answer.record.latency_ms)
    unsteady = not_steady(times)
    return WarmupFacts(
        batches=len(times),
        lookback=WARMUP_LOOKBACK,
        not_steady=None if unsteady is None else unsteady + cut,
    )
