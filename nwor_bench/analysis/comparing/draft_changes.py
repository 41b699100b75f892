"""Change of a draft count's tokens per second over k = 0 from BASE to NEW. Pure.

    log time per token(k) = log time of a window(k) / time(0) - log tokens of a window(k)

Above 1 is slower, as for other cells. Times come from each run's own groups and are independent.
Tokens are compared on the prompts of both runs: if these took as many windows in both, their change
is 0, without an error. A staged count is compared with the same count in mode off, which has
the same tokens.
"""

from collections.abc import Sequence
from math import log, log1p

import numpy as np

from nwor_bench.analysis.comparing.change_estimates import Change
from nwor_bench.analysis.draft_tokens import MIN_REQUESTS, by_prompt, named_rates, requests_of
from nwor_bench.analysis.engine_times import adaptive_tokens
from nwor_bench.analysis.worth import Measured, times_of
from nwor_bench.records.cell import ADAPTIVE, Cell
from nwor_bench.stats.interval import Interval, combined

TIME_PER_TOKEN = "time_per_token"
"""`Change.measure` of a draft count."""


def token_time_change(base: Measured, new: Measured, cell: Cell) -> Change | None:
    """Change of the cell's time per token over k = 0, or over the same count in mode off; None
    without enough groups of windows, or requests, in both runs."""
    arm = (cell.drafts, cell.stock_twin is not None)
    below, above = times_of(base).get(arm), times_of(new).get(arm)
    if below is None or above is None:
        return None
    change = combined(above.value - below.value, [above, below])
    if cell.drafts and cell.stock_twin is None:
        tokens = _tokens_change(base, new, cell.drafts)
        if tokens is None:
            return None
        change = combined(change.value - tokens.value, [change, tokens])
    interval = change.exp()
    return Change(TIME_PER_TOKEN, interval.value, interval)


def _tokens_change(base: Measured, new: Measured, k: int) -> Interval | None:
    """Change of the log tokens of a window, on the prompts of both runs; synthetic acceptance
    is what its rates say, and runs with other rates are not compared."""
    if k == ADAPTIVE:  # the blocks' own, which their times hold too
        earlier, later = adaptive_tokens(base.run), adaptive_tokens(new.run)
        if earlier is None or later is None:
            return None
        return Interval.of(log(later / earlier), 0.0, 1, 0)
    if named_rates(base.run) is not None:
        return Interval.of(0.0, 0.0, 1, 0)
    before, after = (by_prompt(requests_of(own.run, [k])) for own in (base, new))
    prompts = sorted(before.keys() & after.keys())
    pairs = [(before[prompt][k], after[prompt][k]) for prompt in prompts]
    if pairs and all(one == other for one, other in pairs):
        return Interval.of(0.0, 0.0, 1, len(pairs))
    if len(pairs) < MIN_REQUESTS:
        return None
    left_out = [_log_change([*pairs[:n], *pairs[n + 1 :]]) for n in range(len(pairs))]
    error = ((len(pairs) - 1) * float(np.var(left_out))) ** 0.5  # the jackknife's
    return Interval.of(_log_change(pairs), error, len(pairs) - 1, len(pairs))


def _log_change(pairs: Sequence[tuple[tuple[float, ...], tuple[float, ...]]]) -> float:
    """Change of the log tokens, from pairs of (windows, accepted drafts) of the same prompt."""
    (before, accepted), (after, now) = (
        (sum(pair[side][0] for pair in pairs), sum(pair[side][1] for pair in pairs))
        for side in (0, 1)
    )
    return log1p(now / after) - log1p(accepted / before)
