"""What batches of separate engines say: gains over k = 0, and the cost of a schedule.

`rows` are those of restarts.csv. If they are paired, the engines' batches of one repetition were
interleaved, with the same prompts: ratios are those within repetitions, so slow changes of the
host's speed cancel. Otherwise each arm has its own location. Both need 10 repetitions; settings
with fewer are left out.
"""

import numpy as np
import pandas as pd

from nwor_bench.stats.interval import Interval, combined
from nwor_bench.stats.robust import robust_location

PLAIN = "plain"
COST = ["requests", "drafts", "arm", "ratio", "low", "high"]


def drafts_of(arm: str) -> int:
    """1 for `1` and `1/4`, 0 for `plain`."""
    return 0 if arm == PLAIN else int(arm.partition("/")[0])


def window_times(rows: pd.DataFrame, size: int, arm: str) -> pd.Series:
    """Log of the seconds of a window, by repetition."""
    own = rows[(rows.requests == size) & (rows.arm == arm)].set_index("repetition")
    return np.log(own.seconds / own.windows)


def speeds(rows: pd.DataFrame, size: int, arm: str, rates: list[float]) -> pd.Series:
    """Log of the tokens/s of a request, by repetition, at the arm's mean tokens of a window."""
    own = rows[(rows.requests == size) & (rows.arm == arm)]
    tokens = 1 + sum(rates[: drafts_of(arm)])
    if not rates and len(own):
        tokens = own.tokens.sum() / own.windows.sum() / size
    return np.log(tokens) - window_times(rows, size, arm)


def ratio_of(new: pd.Series, base: pd.Series, is_paired: bool) -> Interval | None:
    """new / base of logs by repetition; None if there are fewer than 10."""
    if is_paired:
        located = robust_location(list((new - base).dropna()))
        return None if located is None else located.exp()
    above, below = robust_location(list(new)), robust_location(list(base))
    if above is None or below is None:
        return None
    return combined(above.value - below.value, [above, below]).exp()


def agreement(
    rows: pd.DataFrame, worth: pd.DataFrame, rates: list[float], is_paired: bool
) -> pd.DataFrame:
    """Tokens/s over k = 0 by `worth` and by the restarts, at each batch size and k > 0.

    They agree if they differ by no more than the root of the sum of the squares of both half
    widths, of logs: those of `worth` hold for all k of a batch size, those of the restarts for one.
    With `rates` both sides have these tokens of a window, so what is compared is its time.
    `over_plain` is empty if `plain` did not run.
    """
    found = []
    if rates:  # those of requests without end; `worth` has what requests of its length get
        scale = [1 + sum(rates[: int(k)]) for k in worth.drafts] / worth.tokens
        worth = worth.assign(**{name: worth[name] * scale for name in ("ratio", "low", "high")})
    for said in worth[worth.drafts > 0].dropna(subset="ratio").itertuples():
        size, k = int(said.requests), int(said.drafts)
        new, base, plain = (speeds(rows, size, arm, rates) for arm in (str(k), "0", PLAIN))
        own, over_plain = ratio_of(new, base, is_paired), ratio_of(new, plain, is_paired)
        if own is None:
            continue
        apart = np.log(said.ratio / own.value)
        allowed = np.hypot(np.log(own.high / own.low), np.log(said.high / said.low)) / 2
        found.append({
            "requests": size, "drafts": k, "worth": said.ratio, "worth_low": said.low,
            "worth_high": said.high, "restarts": own.value, "restarts_low": own.low,
            "restarts_high": own.high, "agrees": bool(abs(apart) <= allowed),
            "over_plain": over_plain and over_plain.value,
            "plain_low": over_plain and over_plain.low,
            "plain_high": over_plain and over_plain.high, "apart": apart, "allowed": allowed,
        })  # fmt: skip
    return pd.DataFrame(found)


def schedule_cost(rows: pd.DataFrame, is_paired: bool) -> pd.DataFrame:
    """Time of a window in each engine `K/N`, whose schedule names several counts, over `K`'s."""
    found = []
    for size, arm in (
        rows[["requests", "arm"]].drop_duplicates().sort_values(["requests", "arm"]).values
    ):
        if "/" not in arm:
            continue
        k = drafts_of(arm)
        new, base = (window_times(rows, size, each) for each in (arm, str(k)))
        cost = ratio_of(new, base, is_paired)
        if cost is not None:
            found.append([size, k, arm, cost.value, cost.low, cost.high])
    return pd.DataFrame(found, columns=COST)
