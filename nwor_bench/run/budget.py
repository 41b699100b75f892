"""A run's time budget: warm-up, gate and blocks fit into it; the engine's start does not count.

What it leaves no room for is not measured.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any

from nwor_bench.instruments.device_memory import uses_gpu
from nwor_bench.instruments.processor import bf16_is_slow
from nwor_bench.records.finished_blocks import BlockKey, block_of
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase

WARMUP_SHARE = 0.2
"""Most of the budget that warm-up may take: the rest is for the gate, and for blocks."""

WARMUP_SHARE_IN_TURNS = 0.1
"""The same where cells take turns: neighbours are compared, steady or not."""

CHECK_SHARE = 0.25
"""Most of the budget that whole batches may take where cells take turns: they only check."""

PROBE_SHARE = 0.15
"""Most of the budget that probed blocks may take: timed blocks come first."""

PROBED_BLOCKS = 2
"""Blocks that run once more with each window's phases timed, where the engine has a probe."""

DEFAULT_CI_WIDTH = "1%"
"""The margin of verdict SAME: a narrower interval decides little more."""

DEFAULT_BUDGETS = {"gpu": "120s", "cpu": "60s", "cpu without bf16": "100s"}
"""A first answer within about two minutes. Without native bf16 a gate alone takes half a minute."""

_AMOUNT = ("batches", "ci_width", "max_blocks", "time_budget")


def default_stop(given: Mapping[str, Any]) -> dict[str, str]:
    """When a single run stops whose flags do not say how much to measure; {} where they do."""
    if any(given.get(name) is not None for name in _AMOUNT):
        return {}
    cpu = "cpu without bf16" if bf16_is_slow() else "cpu"
    budget = DEFAULT_BUDGETS["gpu" if uses_gpu() else cpu]
    return {"ci_width": DEFAULT_CI_WIDTH, "time_budget": budget}


class Budget:
    """The clock of one run, begun when its engine has started.

    Args:
        seconds: the budget; None for none.
        run: what is measured already: its finished blocks are not run again, and count.
        interleaved: cells take turns within a batch.
    """

    def __init__(self, seconds: float | None, run: RunData, interleaved: bool = False):
        spent: dict[BlockKey, float] = defaultdict(float)
        for batch in run.batches:
            if block_of(batch) in run.finished:
                spent[block_of(batch)] += batch.latency_ms / 1e3
        self._seconds = seconds
        self._warmup_share = WARMUP_SHARE_IN_TURNS if interleaved else WARMUP_SHARE
        self._blocks = dict(spent)
        self._spent_before = sum(spent.values())
        self._batches: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    @property
    def spent_s(self) -> float:
        """Seconds spent."""
        return self._spent_before + time.perf_counter() - self._began

    def batch(self, seconds: float) -> None:
        """Note how long a batch took."""
        self._batches.append(seconds)

    def block(self, phase: Phase, number: int, seconds: float) -> None:
        """Note how long a phase of a timed block took."""
        self._blocks[phase, number] = seconds

    def has_room_to_warm_up(self) -> bool:
        """Would one more batch as the last one end within warm-up's share?"""
        if self._seconds is None or not self._batches:
            return True
        return self.spent_s + self._batches[-1] <= self._warmup_share * self._seconds

    def has_room_to_check(self, cells: int) -> bool:
        """Would whole batches of so many cells end within the share of checks?"""
        if self._seconds is None:
            return True
        spent = sum(seconds for (phase, _), seconds in self._blocks.items() if phase == Phase.TIMED)
        return spent + self.block_s(Phase.TIMED, cells) <= CHECK_SHARE * self._seconds

    def block_s(self, phase: Phase, batches: int) -> float:
        """Seconds that a block of so many batches takes; from single batches before the first."""
        known = [seconds for (own, _), seconds in self._blocks.items() if own == phase]
        if known:
            return fmean(known)
        return batches * median(self._batches) if self._batches else 0.0

    def probed_blocks(self, cells: int) -> int:
        """Blocks that there is time to probe."""
        if self._seconds is None:
            return PROBED_BLOCKS
        block_s, share = self.block_s(Phase.TIMED, cells), PROBE_SHARE * self._seconds
        return max(n for n in range(PROBED_BLOCKS + 1) if n * block_s <= share)
