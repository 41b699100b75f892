"""Compare acceptance in a cell's interleaved windows with that of off x off's neighbours. Pure.

Only windows of the same group are compared: they have the same requests and neighbouring text. All
timed interleaved batches of a run are added up. This finds what is wrong while a cell has its turn.
A fault that outlasts the turn lowers off x off's acceptance as well: the gate's interleaved batches
and the blocks with whole batches find that one.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from nwor_bench.analysis.parity.acceptance_interval import Acceptance, acceptance_outside
from nwor_bench.analysis.window_counts import Violation
from nwor_bench.records.cell import Cell, NworMode, cell_order
from nwor_bench.records.types import WindowRecord
from nwor_bench.workload.window_order import RUNS

ALPHA = 1e-6
"""Chance of a false alarm in one comparison, over all positions; a run makes one for each cell. In
simulations whose requests keep their rate of acceptance for 1, 2 and 10 windows, differences
scattered by 0.96 to 1.05 times what the interval says."""


def acceptance_violations(windows: Iterable[WindowRecord]) -> Iterator[Violation]:
    """Cells whose acceptance leaves its interval: each on its own, and all that stage together.

    Args:
        windows: of timed interleaved batches, in the order in which they ran.
    """
    counts = _counts(windows).items()
    found = {cell: own for cell, own in counts if own.drafts and own.expected_drafts}
    broken = {cell: text for cell, own in found.items() if (text := acceptance_outside(own, ALPHA))}
    staging = [cell for cell in found if cell.nwor_mode is not NworMode.OFF]
    if staging and not any(cell in broken for cell in staging):
        total, *rest = (found[cell] for cell in staging)
        for own in rest:
            total = total.plus(own)
        text = acceptance_outside(total, ALPHA)
        broken |= dict.fromkeys(staging, f"all that stage together: {text}") if text else {}
    for cell in sorted(broken, key=cell_order):
        yield Violation(cell, f"{cell.label}, interleaved windows: {broken[cell]}.")


def _counts(windows: Iterable[WindowRecord]) -> dict[Cell, Acceptance]:
    """Each cell's counts and off x off's, from the complete groups that both share."""
    found: dict[Cell, Acceptance] = {}
    batches: dict[Cell, set[tuple[int, int]]] = defaultdict(set)
    inside = (window for window in windows if window.group is not None)
    for (block, batch, _), members in groupby(inside, key=lambda w: (w.block, w.batch, w.group)):
        own = list(members)
        ours = [window for window in own if not window.cell.is_baseline]
        theirs = [window for window in own if window.cell.is_baseline]
        if len(own) != RUNS * (own[0].run_length or 0) or len(ours) != len(theirs):
            continue  # cut by the end of its batch, or a pair without off x off
        cell = ours[0].cell
        if cell.arm is not None:
            continue  # the A/A arm is off x off again
        new = (block, batch) not in batches[cell]
        batches[cell].add((block, batch))
        width = max(len(window.accepted_per_position) for window in own)
        counts = Acceptance(*_sums(ours, width), *_sums(theirs, width), batches=int(new))
        found[cell] = found[cell].plus(counts) if cell in found else counts
    return found


def _sums(windows: Sequence[WindowRecord], width: int) -> tuple[tuple[int, ...], int]:
    """Accepted drafts of `width` positions, and windows of a request that had drafts."""
    rows = [[0] * width, *(window.accepted_per_position for window in windows)]
    drafts = sum(window.drafts_per_position[0] for window in windows if window.drafts_per_position)
    return tuple(map(sum, zip_longest(*rows, fillvalue=0))), drafts
