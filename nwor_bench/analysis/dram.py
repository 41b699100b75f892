"""DRAM bytes of each cell's windows, and their differences from off x off. Pure.

Uses only batches of phase "counters". A window counts in the steady state: all requests take part,
none is being prefilled, and it is not among the batch's first windows, in which L2 still writes
back the prefill's data. Windows of two cells are compared at the same place: equal requests,
drafts, and tokens generated so far.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nwor_bench.analysis.invariants import accepted, windows_by_batch
from nwor_bench.models.byte_model import BY_REFERENCE, CACHE_BITS, COPY_SPILLED, DIRECT, Strategy
from nwor_bench.models.recurrent import Moved, added_by_staging
from nwor_bench.records.cell import Cell, NworMode, ScvMode, cell_order
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, BatchRecord, Phase, StageBy, WindowRecord
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import smallest_effect
from nwor_bench.stats.paired import mean_of

if TYPE_CHECKING:
    from pandas import DataFrame

COUNTERS = ("dram_read_bytes", "dram_write_bytes")


def strategy_of(header: RunHeader) -> Strategy:
    """The byte model's strategy for the run's mode `stage` on a GPU."""
    return BY_REFERENCE if header.spec.stage_by == StageBy.REFERENCE else COPY_SPILLED


def predicted_difference(
    engine: EngineStatus,
    staged: float,
    accepted_tokens: float,
    strategy: Strategy = BY_REFERENCE,
    requests: float = 0.0,
) -> dict[str, float]:
    """Predicted bytes of a staged window minus those of a direct one, by counter.

    Args:
        engine: the engine's facts; `bytes_per_token` is one token's bytes in all caches.
        staged, accepted_tokens: drafts and accepted drafts of a window.
        strategy: the staging strategy.
        requests: requests of the window. By reference, the commit also writes each request's
            certain first token and reads its activations first.

    Empty if the engine's sizes are unknown.
    """
    row, dtype, cache = engine.bytes_per_token, str(engine.dtype), engine.kv_cache_dtype or "auto"
    cache = dtype if cache == "auto" else cache
    if row is None or dtype not in CACHE_BITS or cache not in CACHE_BITS:
        return {}
    wide = row * CACHE_BITS[dtype] / CACHE_BITS[cache]
    moved = {True: requests * wide if strategy is BY_REFERENCE else 0.0, False: 0.0}
    for how, sign in ((strategy, 1), (DIRECT, -1)):
        for move in how.moves:
            rows = sign * move.rows(staged, accepted_tokens)
            moved[move.reads] += rows * (wide if move.as_activations else row)
    states = Moved(0, 0)
    if engine.state_bytes is not None and engine.state_record_token_bytes is not None:
        sizes = engine.state_bytes, engine.state_record_token_bytes
        states = added_by_staging(*sizes, requests, staged, accepted_tokens)
    return {
        "dram_read_bytes": moved[True] + states.read,
        "dram_write_bytes": moved[False] + states.written,
    }


@dataclass(frozen=True)
class CellBytes:
    """One cell's bytes per window.

    Attributes:
        cell: the cell that the windows belong to.
        windows, blocks: how many were counted.
        staged, accepted: mean drafts and accepted drafts of a counted window; None without one.
        amounts: mean bytes per window over blocks, by counter; one that was not read is missing.
        differences: bytes minus those of off x off's matching windows; empty for off x off.
        visible: by counter, the smallest difference that this many blocks with this noise detect
            in 80 % of runs.
        matched: windows behind the differences.
        predicted: differences predicted by the byte model, by counter.
    """

    cell: Cell
    windows: int
    blocks: int
    staged: float | None
    accepted: float | None
    amounts: Mapping[str, Interval]
    differences: Mapping[str, Interval]
    visible: Mapping[str, float]
    matched: int
    predicted: Mapping[str, float]


_COLUMNS = ("block", "requests", "drafts", "generated", "accepted", "is_staged", *COUNTERS)
_PLACE = ["block", "requests", "drafts", "generated"]
"""Windows of two cells are compared if these are equal; the last are the tokens that the batch
generated before the window."""


def cell_bytes(run: RunData) -> list[CellBytes]:
    """One entry per counted cell, off x off first."""
    counted = [batch for batch in run.batches if batch.phase == Phase.COUNTERS]
    if not counted:
        return []
    from pandas import DataFrame  # few runs have counters

    windows, frames = windows_by_batch(run), {}
    for cell in sorted({batch.cell for batch in counted}, key=cell_order):
        batches = [batch for batch in counted if batch.cell == cell]
        rows = [row for b in batches for row in _steady(b, windows[batch_key(b)])]
        frames[cell] = DataFrame(rows, columns=_COLUMNS, dtype=float)
    return [_of_cell(run, cell, frames) for cell in frames]


def _steady(
    batch: BatchRecord, windows: Sequence[WindowRecord]
) -> Iterator[Sequence[float | None]]:
    """The batch's windows that count, as rows of `_COLUMNS`."""
    generated = steady = 0
    for window in windows:
        kept = accepted(window)
        # All requests take part: none is being prefilled, none has finished.
        if window.num_reqs == batch.requests and not window.uncounted_draft_tokens:
            steady += 1
            if steady > SETTLING and window.dram_write_bytes is not None:
                place = (batch.block, window.num_reqs, window.draft_tokens, generated)
                read = (window.dram_read_bytes, window.dram_write_bytes)
                yield *place, kept, window.staged_tokens > 0, *read
        generated += kept + window.num_reqs


def _of_cell(run: RunData, cell: Cell, frames: "Mapping[Cell, DataFrame]") -> CellBytes:
    frame, baseline = frames[cell], Cell(cell.pair, NworMode.OFF, ScvMode.OFF)
    differences: dict[str, Interval] = {}
    matched = 0
    if cell != baseline and baseline in frames:
        ours, theirs = (
            frames[amount].groupby(_PLACE)[[*COUNTERS]].mean() for amount in (cell, baseline)
        )
        matched = int(frame.set_index(_PLACE).index.isin(theirs.index).sum())
        differences = _over_blocks(ours - theirs)  # NaN at places that only one of them has
    drafts, kept, requests = (
        float(frame[name].mean()) for name in ("drafts", "accepted", "requests")
    )
    predicted: dict[str, float] = {}
    if frame["is_staged"].any():
        how = strategy_of(run.header)
        predicted = predicted_difference(run.header.engine, drafts, kept, how, requests)
    return CellBytes(
        cell=cell,
        windows=len(frame),
        blocks=frame["block"].nunique(),
        staged=drafts if len(frame) else None,
        accepted=kept if len(frame) else None,
        amounts=_over_blocks(frame),
        differences=differences,
        visible={name: smallest_effect(gap, len(frames) - 1)
                 for name, gap in differences.items() if gap.is_bounded},
        matched=matched,
        predicted=predicted,
    )  # fmt: skip


def _over_blocks(values: "DataFrame") -> dict[str, Interval]:
    """By counter, the mean over blocks; without a value it is missing."""
    blocks = values.groupby("block")[[*COUNTERS]].mean()
    means = {name: blocks[name].dropna().to_numpy() for name in COUNTERS}
    return {name: mean_of(mean) for name, mean in means.items() if len(mean)}
