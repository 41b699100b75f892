"""Warm-up: batches of off x off until their window times are steady."""

from collections.abc import Callable
from statistics import fmean

from nwor_bench.analysis.trend import WARMUP_LOOKBACK, not_steady
from nwor_bench.records.header import WarmupFacts
from nwor_bench.run.batch import RanBatch


def warm_up(run: Callable[[], RanBatch], least: int, most: int) -> WarmupFacts:
    """Run `least` to `most` batches; in between, until their times are steady.

    Args:
        run: runs one batch of off x off.
        least: fewest batches.
        most: most batches.
    """
    times: list[float] = []
    while len(times) < most:
        if len(times) >= least and not_steady(times) is None:
            break
        batch = run()
        walls = [window.wall_ms for window in batch.windows if window.wall_ms is not None]
        times.append(fmean(walls) if walls else batch.answer.record.latency_ms)
    unsteady = not_steady(times)
    return WarmupFacts(batches=len(times), lookback=WARMUP_LOOKBACK, not_steady=unsteady)
