"""Input of the stopping rule: the cells' intervals after a block."""

from collections.abc import Iterable
from dataclasses import replace

from nwor_bench.analysis.aggregate import summarise
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Phase

_BEFORE_A_LOOK = (
    Phase.WARMUP, Phase.GATE, Phase.INTERLEAVED_GATE, Phase.TIMED, Phase.INTERLEAVED,
)  # fmt: skip
"""Phases of the batches that the stopping rule uses; later phases come after the last check."""


def half_widths(run: RunData, done: int) -> list[float | None]:
    """Half the interval of every compared cell; None for a cell without one.

    Uses only records up to block `done`, so that a resumed run stops at the same block as an
    uninterrupted one.
    """
    cells = summarise(_as_of(run, done))
    return [cell.half_width for cell in cells if cell.ratio_to_off is not None]


def _as_of(run: RunData, done: int) -> RunData:
    """The run's records up to `done` timed blocks, faults included."""

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
