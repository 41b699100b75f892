"""A run's clock, its finished blocks, warm-up, and the intervals that may end it.

Warm-up, gate and blocks fit into the budget; the engine's start does not count. A resumed run goes
on behind its last finished block and neither runs nor checks finished ones again. An interrupted
block runs again as a whole: its cells are compared with each other, and two engine processes break
ties differently.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from nwor_bench.instruments.device import uses_gpu
from nwor_bench.records.header import WarmupFacts
from nwor_bench.records.store import (
    FINISHED_EVENT,
    SUPERSEDED_EVENT,
    BlockKey,
    RunData,
    RunStore,
    block_of,
)
from nwor_bench.records.types import BatchRecord, Phase, Verdict
from nwor_bench.run.batch import RanBatch
from nwor_bench.stats.trend import not_steady
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK
from nwor_bench.workload.scenario_values import ScenarioValues
from nwor_bench.workload.schedule import Block
from nwor_bench.workload.stopping import CHECK_SHARE

WARMUP_SHARE = 0.2
"""Most of the budget that warm-up may take: the rest is for the gate, and for blocks."""

WARMUP_SHARE_INTERLEAVED = 0.1
"""WARMUP_SHARE of interleaved cells: neighbours are compared, steady or not."""

DEFAULT_CI_WIDTH = "1%"
"""The margin of verdict SAME: a narrower interval decides little more."""

DEFAULT_BUDGET = "120s"
"""A first answer on a GPU within about two minutes."""

CHECKED_REQUESTS, CHECKED_TOKENS = 4, 12
"""Most requests and new tokens of a run that only checks, unless flags say more: on a CPU without
native bf16 a batch of eight requests takes up to 20 s."""

_AMOUNT = ("batches", "ci_width", "max_blocks", "max_warmup", "time_budget", "counters")


def default_amount(given: Mapping[str, Any], workload: ScenarioValues) -> dict[str, Any]:
    """How much a single run measures if its flags do not say so; {} if they do.

    A CPU only checks the output: its times would say nothing about NWOR.
    """
    if any(given.get(name) is not None for name in _AMOUNT):
        return {}
    if uses_gpu():
        return {"ci_width": DEFAULT_CI_WIDTH, "time_budget": DEFAULT_BUDGET}
    few = {
        "batches": 0,
        "requests": min(CHECKED_REQUESTS, workload.requests),
        "max_new_tokens": min(CHECKED_TOKENS, workload.max_new_tokens),
    }
    return {name: value for name, value in few.items() if given.get(name) is None}


class Budget:
    """The clock of one run, begun when its engine has started.

    Args:
        seconds: the budget; None for none.
        run: what is measured already: its finished blocks are not run again, and count.
        interleaved: cells are interleaved within a batch.
    """

    def __init__(self, seconds: float | None, run: RunData, interleaved: bool = False):
        spent: dict[BlockKey, float] = defaultdict(float)
        for batch in run.batches:
            block = block_of(batch)
            if block in run.finished:
                spent[block] += batch.latency_ms / 1e3
        self.seconds = seconds
        """The budget; a batch size may get another share of it."""
        self.interleaved = interleaved
        self._warmup_share = WARMUP_SHARE_INTERLEAVED if interleaved else WARMUP_SHARE
        self._blocks = dict(spent)
        self._spent_before = sum(spent.values())
        self.batches: list[float] = []
        """Seconds of each batch that ran, untimed ones too."""
        self.parts = defaultdict(float, run.header.spent_s or {})
        """Seconds spent by part, over all tries."""
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    @property
    def spent_s(self) -> float:
        """Seconds spent."""
        return self._spent_before + time.perf_counter() - self._began

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as this part's."""
        began = self.spent_s
        try:
            yield
        finally:
            self.parts[name] += self.spent_s - began

    def gate_room_s(self) -> float | None:
        """Seconds of CHECK_SHARE that are left for the gate; None without a budget."""
        return None if self.seconds is None else CHECK_SHARE * self.seconds - self.spent_s

    def batch(self, seconds: float) -> None:
        """Note how long a batch took."""
        self.batches.append(seconds)

    def block(self, phase: Phase, number: int, seconds: float) -> None:
        """Note how long a phase of a timed block took."""
        self._blocks[phase, number] = seconds

    def has_room_to_warm_up(self) -> bool:
        """Would one more batch as the last one end within warm-up's share?"""
        if self.seconds is None or not self.batches:
            return True
        return self.spent_s + self.batches[-1] <= self._warmup_share * self.seconds

    def has_room_to_check(self, cells: int) -> bool:
        """Would whole batches of so many cells end within CHECK_SHARE?"""
        if self.seconds is None:
            return True
        windows_s = sum(s for (phase, _), s in self._blocks.items() if phase == Phase.INTERLEAVED)
        spent = self.spent_s - windows_s
        return spent + self.block_s(Phase.TIMED, cells) <= CHECK_SHARE * self.seconds

    def block_s(self, phase: Phase, batches: int, *, longest: bool = False) -> float:
        """Seconds that a block of so many batches takes; from single batches before the first.

        As the longest one: not every one has to prefill.
        """
        known = [seconds for (ran, _), seconds in self._blocks.items() if ran == phase]
        if known:
            return max(known) if longest else fmean(known)
        return batches * median(self.batches) if self.batches else 0.0


class BlockLog:
    """Notes each block's begin and end in the run's store.

    Args:
        store: receives the events.
        run: what is stored already.

    Attributes:
        finished_before: blocks that an earlier start finished.
    """

    def __init__(self, store: RunStore, run: RunData):
        self.finished_before = run.finished
        self._store = store
        self._cut = run.cut_blocks()

    def is_cut(self, phase: Phase, block: Block) -> bool:
        """True for a block that an earlier start began, until it begins again."""
        return (phase, block.number) in self._cut

    def begin(self, phase: Phase, block: Block) -> bool:
        """False if the block is finished; what it had before it was cut is set aside."""
        key: BlockKey = (phase, block.number)
        if key in self.finished_before:
            return False
        if key in self._cut:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._append(SUPERSEDED_EVENT, key, batches=sorted(self._cut.pop(key)), at=at)
        return True

    def finish(self, phase: Phase, block: Block) -> None:
        """Note that the block was run and checked to its end."""
        self._append(FINISHED_EVENT, (phase, block.number))

    def _append(self, event: str, key: BlockKey, **more: Any) -> None:
        self._store.append_event({"event": event, "phase": key[0], "block": key[1], **more})


_BEFORE_A_LOOK = (
    Phase.WARMUP, Phase.GATE, Phase.INTERLEAVED_GATE, Phase.TIMED, Phase.INTERLEAVED,
)  # fmt: skip
"""Phases of the batches that the stopping rule uses; later phases come after the last check."""


def half_widths(run: RunData, done: int) -> list[float | None]:
    """Half the interval of every compared cell, of draft counts that of tokens/s; None for a cell
    without one.

    Uses only records up to block `done`, so that a resumed run stops at the same block as an
    uninterrupted one.
    """
    from nwor_bench.analysis.analyse import analyse  # imports scipy: half a second

    analysis = analyse(_as_of(run, done))
    if analysis.worth is not None:
        ratios = [r.ratio for r in analysis.worth.rates if r.verdict != Verdict.INVALID]
        return [None if ratio is None else ratio.half_width / ratio.value for ratio in ratios]
    cells = analysis.cells
    return [cell.half_width for cell in cells if cell.ratio is not None]


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


def warm_up(run: Callable[[], RanBatch], least: int, most: int, budget: Budget) -> WarmupFacts:
    """Run `least` to `most` batches; in between, until their times are steady or time is short.

    Args:
        run: runs one batch of off x off.
        least: fewest batches.
        most: most batches.
        budget: the run's; warm-up may take a share of it.
    """
    times: list[float] = []
    cut = ""
    while len(times) < most:
        if len(times) >= least and not_steady(times, WARMUP_LOOKBACK) is None:
            break
        if len(times) >= least and not budget.has_room_to_warm_up():
            cut = "; --time-budget left no room for more"
            break
        batch = run()
        walls = [window.wall_ms for window in batch.windows if window.wall_ms is not None]
        times.append(fmean(walls) if walls else batch.answer.record.latency_ms)
    if budget.interleaved and least == most < WARMUP_LOOKBACK:
        return WarmupFacts(batches=len(times))  # neighbours are compared, steady or not
    unsteady = not_steady(times, WARMUP_LOOKBACK)
    return WarmupFacts(
        batches=len(times),
        lookback=WARMUP_LOOKBACK,
        not_steady=None if unsteady is None else unsteady + cut,
    )
