"""A staging cell's effect in two parts: the attention kernel, and the writes.

control x off reads a window's K/V as stage does and writes directly as off does. So control over
off is what the other attention is worth, and stage over control what not writing is worth, with
validation and commit. Only cells that took turns with control x off are split; of others the total
alone is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nwor_bench.analysis.interleaved.agreement import WINDOWS
from nwor_bench.analysis.interleaved.effects import PairEffect, effects_over_off
from nwor_bench.analysis.statistics import RatioInterval
from nwor_bench.records.cell import Cell, NworMode
from nwor_bench.records.types import CellResult


@dataclass(frozen=True)
class Split:
    """One staging cell's parts, each with its interval."""

    cell: Cell
    control: Cell
    clock: str
    total: RatioInterval
    """stage over off."""

    attention: RatioInterval
    """control over off."""

    writes: RatioInterval
    """stage over control."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        parts = {"total": self.total, "attention": self.attention, "writes": self.writes}
        return {
            "cell": self.cell.label,
            "control": self.control.label,
            "compared": self.clock,
            **{
                name: {"ratio": part.ratio, "low": part.low, "high": part.high}
                for name, part in parts.items()
            },
        }


def splits(effects: Sequence[PairEffect], cells: Sequence[CellResult]) -> list[Split]:
    """One entry a staging cell with groups against control x off, and both against off x off.

    Both cells' own ratios must be those of windows: one that is INVALID or INEFFECTIVE, or that
    whole batches decided, is not split.
    """
    trusted = {cell.cell for cell in cells if cell.compared and cell.interleaved == WINDOWS}
    over_off = effects_over_off(effects)
    found = []
    for writes in effects:
        control, stage = writes.pair.reference, writes.pair.treated
        if control.nwor_mode is not NworMode.CONTROL or not {control, stage} <= trusted:
            continue
        total, attention = over_off.get(stage), over_off.get(control)
        if total is None or attention is None:
            continue
        parts = [each.decisive for each in (total, attention, writes)]
        robust = [part.robust for part in parts if part is not None]
        if len(robust) == len(parts):
            found.append(Split(stage, control, total.clock, *robust))
    return found
