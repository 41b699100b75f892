"""The ratio of the leading cell while a run goes on, from what was timed until now."""

from collections.abc import Iterable
from math import exp
from statistics import fmean

from nwor_bench.analysis.interleaved.groups import find_groups
from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.analysis.statistics import geometric_mean_ratio, paired_ratio
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Cell, NworMode, Phase, WindowRecord

_TIMED = (Phase.TIMED, Phase.INTERLEAVED)


class RunningRatio:
    """Ratios of each block, for the terminal alone: windows of whole batches are not matched as in
    the report, and the interval is the cell's own.

    Args:
        run: what an earlier start measured.
    """

    def __init__(self, run: RunData):
        self._blocks: dict[Phase, dict[int, dict[Cell, float]]] = {each: {} for each in _TIMED}
        windows = windows_by_batch(run)
        for batch in run.batches:
            self.add(batch, windows[batch_key(batch)])

    def add(self, batch: BatchRecord, windows: Iterable[WindowRecord]) -> None:
        """Take in a batch that has ended; those that are not timed are left out."""
        if batch.phase not in _TIMED:
            return
        times = _in_turns(windows) if batch.phase == Phase.INTERLEAVED else _whole(windows)
        self._blocks[batch.phase].setdefault(batch.block, {}).update(times)

    def leading(self, live: Iterable[Cell]) -> str | None:
        """`stage x graph 0.974 [0.968, 0.980] of off x off, 12 blocks`, the lowest ratio of the
        live cells; None before a block has ended. Of cells without NWOR only if there are no
        others."""
        cells = [cell for cell in live if not cell.is_baseline and cell.arm is None]
        staged = [cell for cell in cells if cell.nwor_mode is not NworMode.OFF]
        rated = [(pairs, cell) for cell in staged or cells if (pairs := self._pairs(cell))]
        if not rated:
            return None
        pairs, cell = min(rated, key=lambda own: geometric_mean_ratio(*own[0]))
        blocks = len(pairs[0])
        found = paired_ratio(*pairs)
        if found is None:
            ratio = f"{geometric_mean_ratio(*pairs):.3f}"
        else:
            ratio = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
        return f"{cell.label} {ratio} of off x off, {blocks} block{'s' if blocks > 1 else ''}"

    def _pairs(self, cell: Cell) -> tuple[list[float], list[float]] | None:
        """Its times and those of off x off, block by block; interleaved ones if there are any."""
        for phase in (Phase.INTERLEAVED, Phase.TIMED):
            both = [
                (own[cell], base)
                for own in self._blocks[phase].values()
                if cell in own and (base := _baseline(own)) is not None
            ]
            if both:
                ours, theirs = zip(*both, strict=True)
                return list(ours), list(theirs)
        return None


def _baseline(block: dict[Cell, float]) -> float | None:
    return next((ms for cell, ms in block.items() if cell.is_baseline), None)


def _whole(windows: Iterable[WindowRecord]) -> dict[Cell, float]:
    """Mean window time of each cell."""
    times: dict[Cell, list[float]] = {}
    for window in windows:
        if window.wall_ms is not None:
            times.setdefault(window.cell, []).append(window.wall_ms)
    return {cell: fmean(own) for cell, own in times.items()}


def _in_turns(windows: Iterable[WindowRecord]) -> dict[Cell, float]:
    """Each cell's time in units of that of off x off, from the groups that both share."""
    effects: dict[Cell, list[float]] = {}
    times: dict[Cell, float] = {}
    for group in find_groups(windows).counted:
        if group.pair.reference.is_baseline:
            times[group.pair.reference] = 1.0
            effect = group.host if group.device is None else group.device
            effects.setdefault(group.pair.treated, []).append(effect)
    return times | {cell: exp(fmean(own)) for cell, own in effects.items()}
