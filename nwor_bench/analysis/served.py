"""The one draft count of all batch sizes. Pure."""

from statistics import geometric_mean

from nwor_bench.analysis.draft_rates import Worth


def best_fixed(worth: Worth) -> int | None:
    """The draft count with the best tokens/s over the batch sizes at which every count was measured
    (geometric mean, 0 included); None without one."""
    open_sizes = {rate.requests for rate in worth.rates if rate.ratio is None}
    ratios: dict[int, list[float]] = {0: [1.0]}
    for rate in worth.rates:
        if rate.ratio is not None and rate.requests not in open_sizes and not rate.adaptive:
            ratios.setdefault(rate.drafts, []).append(rate.ratio)
    if len(ratios) == 1:
        return None
    return max(ratios, key=lambda k: geometric_mean(ratios[k]))
