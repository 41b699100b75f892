"""What the stopping rule looks at: the cells' intervals as they were after a block."""

from collections.abc import Iterable
from dataclasses import replace

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase

_BEFORE_A_LOOK = (Phase.WARMUP, Phase.GATE, Phase.TIMED)
"""Phases of the batches that a look may see; the others come after the last."""


def half_widths(run: RunData, done: int) -> list[float | None]:
    """Half the interval of every cell that is compared; None for one without.

    From the records up to block `done` alone, so that a resumed run comes to the same answer as
    one that was never cut short.
    """
    cells = summarise(_as_of(run, done))
    return [cell.half_width for cell in cells if cell.ratio_to_off is not None]


def _as_of(run: RunData, done: int) -> RunData:
    """The run as it was after `done` timed blocks, faults included; later ones are left out."""

    def known(batches: Iterable[BatchRecord]) -> tuple[BatchRecord, ...]:
        return tuple(b for b in batches if b.block <= done and b.phase in _BEFORE_A_LOOK)

    batches, superseded = known(run.batches), known(run.superseded)
    numbers = {batch.batch for batch in (*batches, *superseded)}
    return replace(
        run,
        batches=batches,
        superseded=superseded,
        windows=tuple(w for w in run.windows if w.batch in numbers),
        superseded_windows=tuple(w for w in run.superseded_windows if w.batch in numbers),
        events=tuple(event for event in run.events if event.get("block", 0) <= done),
    )
