"""Who sets the pace of windows, the host or the GPU? From the groups' effects on both clocks. Pure.

Where the GPU does, the host runs ahead, and what delays it for one window is caught up in the next:
both clocks scatter apart. Where the host does, the GPU begins a window as the host launches it, and
both clocks show the same delays (sweeps/studies/interleave has both kinds of H200).
"""

from collections.abc import Sequence

from scipy.stats import spearmanr

from nwor_bench.analysis.interleaved.groups import Group

LEAST_GROUPS = 20


def correlation_of_clocks(groups: Sequence[Group]) -> float | None:
    """Spearman's rank correlation of the groups' effects on the device's and the host's clock.

    None below LEAST_GROUPS, without a device's clock, or where a clock shows no scatter.
    """
    both = [(group.device, group.host) for group in groups if group.device is not None]
    if len(both) < LEAST_GROUPS:
        return None
    device, host = zip(*both, strict=True)
    if len(set(device)) == 1 or len(set(host)) == 1:
        return None
    return float(spearmanr(device, host).statistic)
