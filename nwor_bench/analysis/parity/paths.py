"""Paths on which a cell was timed and that its gate did not compare. Pure."""

from collections.abc import Iterable

from nwor_bench.records.lines import batch_key
from nwor_bench.records.types import WindowRecord


def ungated_paths(gated: Iterable[WindowRecord], timed: Iterable[WindowRecord]) -> tuple[str, ...]:
    """Paths of a cell's timed windows that none of its gate's windows took.

    Only windows with as many requests as any of their batch count. As requests end, a batch has
    windows of every smaller size for a moment, so chance decides which of them a gate has.
    Windows without a path (written directly, or of an older version) need no gate.
    """
    windows, largest = list(timed), dict[tuple[str, int, int], int]()
    for window in windows:
        key = batch_key(window)
        largest[key] = max(window.num_reqs, largest.get(key, 0))
    known = {None, *(window.path for window in gated)}
    full = (w.path for w in windows if w.num_reqs == largest[batch_key(w)])
    return tuple(dict.fromkeys(path for path in full if path is not None and path not in known))
