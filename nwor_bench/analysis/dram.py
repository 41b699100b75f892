"""DRAM bytes of each cell's windows, and their differences from off x off. Pure.

Uses only batches of phase "counters". A window counts in the steady state: all requests take part,
none is being prefilled, and it is not among the batch's first windows, in which L2 still writes
back the prefill's data. Windows of two cells are compared at the same place: equal requests,
drafts, and tokens generated so far.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from nwor_bench.analysis.invariants import accepted, windows_by_batch
from nwor_bench.models.byte_model import BY_REFERENCE, CACHE_BITS, COPY_SPILLED, DIRECT, Strategy
from nwor_bench.models.recurrent import Moved, added_by_staging
from nwor_bench.records.cell import Cell, NworMode, ScvMode, cell_order
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import RunHeader
from nwor_bench.records.lines import BatchKey, batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, BatchRecord, Phase, StageBy, WindowRecord
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import smallest_effect
from nwor_bench.stats.paired import mean_of


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

    def moved(how: Strategy, reads: bool) -> float:
        return sum(
            move.rows(staged, accepted_tokens) * (wide if move.as_activations else row)
            for move in how.moves
            if move.reads is reads
        )

    first_tokens = requests * wide if strategy is BY_REFERENCE else 0.0
    states = Moved(0, 0)
    if engine.state_bytes is not None and engine.state_record_token_bytes is not None:
        sizes = engine.state_bytes, engine.state_record_token_bytes
        states = added_by_staging(*sizes, requests, staged, accepted_tokens)
    read = first_tokens + moved(strategy, True) - moved(DIRECT, True)
    return {
        "dram_read_bytes": read + states.read,
        "dram_write_bytes": moved(strategy, False) - moved(DIRECT, False) + states.written,
    }


COUNTERS = ("dram_read_bytes", "dram_write_bytes")

Place = tuple[int, int, int]
"""Requests with drafts, draft tokens, and tokens that the batch generated before the window."""


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


def cell_bytes(run: RunData) -> list[CellBytes]:
    """One entry per counted cell, off x off first."""
    counted = [batch for batch in run.batches if batch.phase == Phase.COUNTERS]
    cells = sorted({batch.cell for batch in counted}, key=cell_order)
    windows = windows_by_batch(run)
    placed = {cell: _placed(counted, cell, windows) for cell in cells}
    compared = len(cells) - 1
    return [_of_cell(run, cell, placed, compared) for cell in cells]


Blocks = dict[int, dict[Place, list[WindowRecord]]]
"""A cell's counted windows, by block and place."""


def _placed(
    batches: Sequence[BatchRecord], cell: Cell, windows: Mapping[BatchKey, list[WindowRecord]]
) -> Blocks:
    blocks: Blocks = defaultdict(lambda: defaultdict(list))
    for batch in batches:
        if batch.cell != cell:
            continue
        generated = steady = 0
        for window in windows[batch_key(batch)]:
            # All requests take part: none is being prefilled, none has finished.
            if window.num_reqs == batch.requests and not window.uncounted_draft_tokens:
                steady += 1
                if steady > SETTLING and window.dram_write_bytes is not None:
                    place = (window.num_reqs, window.draft_tokens, generated)
                    blocks[batch.block][place].append(window)
            generated += accepted(window) + window.num_reqs
    return blocks


def _of_cell(run: RunData, cell: Cell, placed: Mapping[Cell, Blocks], compared: int) -> CellBytes:
    own = placed[cell]
    flat = [w for places in own.values() for group in places.values() for w in group]
    baseline = Cell(cell.pair, NworMode.OFF, ScvMode.OFF)
    differences: dict[str, Interval] = {}
    matched = 0
    if cell != baseline and baseline in placed:
        differences, matched = _differences(own, placed[baseline])
    staged = fmean([w.draft_tokens for w in flat]) if flat else None
    kept = fmean([accepted(w) for w in flat]) if flat else None
    predicted: dict[str, float] = {}
    engine, how = run.header.engine, strategy_of(run.header)
    if staged is not None and kept is not None and any(w.staged_tokens for w in flat):
        requests = fmean([w.num_reqs for w in flat])
        predicted = predicted_difference(engine, staged, kept, how, requests)
    return CellBytes(
        cell=cell,
        windows=len(flat),
        blocks=len(own),
        staged=staged,
        accepted=kept,
        amounts={name: amount for name in COUNTERS if (amount := _amount(own, name))},
        differences=differences,
        visible={name: smallest_effect(found, compared)
                 for name, found in differences.items() if found.is_bounded},
        matched=matched,
        predicted=predicted,
    )  # fmt: skip


def _amount(blocks: Blocks, name: str) -> Interval | None:
    flat = [[w for group in places.values() for w in group] for places in blocks.values()]
    means = [mean for windows in flat if (mean := _mean(windows, name)) is not None]
    return mean_of(np.array(means)) if means else None


def _differences(own: Blocks, base: Blocks) -> tuple[dict[str, Interval], int]:
    """By counter, the mean difference over places that both cells have; and the windows used."""
    by_counter: dict[str, list[float]] = defaultdict(list)
    matched = 0
    for block in sorted(own.keys() & base.keys()):
        shared = own[block].keys() & base[block].keys()
        matched += sum(len(own[block][place]) for place in shared)
        for name in COUNTERS:
            pairs = [(_mean(own[block][at], name), _mean(base[block][at], name)) for at in shared]
            gaps = [ours - theirs for ours, theirs in pairs
                    if ours is not None and theirs is not None]  # fmt: skip
            if gaps:
                by_counter[name].append(fmean(gaps))
    return {name: mean_of(np.array(gaps)) for name, gaps in by_counter.items()}, matched


def _mean(windows: Sequence[WindowRecord], name: str) -> float | None:
    values = [value for window in windows if (value := getattr(window, name)) is not None]
    return fmean(values) if values else None
