"""Batch sizes that share a time budget: it has room for all, for both ends, or for one. Pure."""

from collections.abc import Iterable, Sequence
from math import ceil

from nwor_bench.analysis.draft_rates import MIN_JUDGED
from nwor_bench.report.text import clock, joined, plural
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.schedule import Plan
from nwor_bench.workload.sweep_file import size_weight

MAX_GATE_SHARE = 2 / 3
"""Largest share of the time left that a size's gate may take: windows need the rest."""


GROUP_WINDOWS = 24
"""Tokens of a batch for each group of draft counts that is wanted: four runs of three or four
windows, and as much again for accepted drafts, and for groups that the batch's end cuts."""


def timed_batches(plan: Plan, spec: RunSpec) -> int:
    """Batches that take as long as what is timed for a verdict on each draft count; of modes 1."""
    if not spec.experiment.compares_drafts:
        return 1
    batches = MIN_JUDGED * len(plan.cells)
    if plan.interleaved:
        tokens = plan.blocks[0].new_tokens or spec.scenario.max_new_tokens
        batches = ceil(batches * GROUP_WINDOWS / tokens)
        batches += len(plan.cells) * bool(spec.scenario.temperature)
    return batches


class NoTimeLeft(Exception):
    """The time is too short for a batch size whose gate has begun."""


class BatchSizes:
    """Batch sizes that share a time budget. Those without room are left out, so that the others are
    measured well.

    Args:
        seconds: the budget, without the engine's start.
        sizes: requests of each batch.
    """

    def __init__(self, seconds: float, sizes: Iterable[int]):
        self.seconds, self.spent_s = seconds, 0.0
        self._left = sorted(sizes)

    def finish(self, size: int, spent_s: float) -> None:
        """Note that a size's run has ended."""
        self.spent_s += spent_s
        self._left = [each for each in self._left if each != size]

    def has_room(self, size: int) -> bool:
        """False for a size that is left out."""
        return size in self._left

    def share_s(self, size: int) -> float:
        """Seconds for a size that has room, from the start of its gate."""
        return (self.seconds - self.spent_s) * size_weight(size) / _weight(self._left)

    def forecast(self, size: int, gate_s: float, timed_s: float) -> str | None:
        """Leave out what has no room, by what a size needs; None if there is nothing to say of it.

        Args:
            size: whose gate has begun.
            gate_s: seconds that it takes in all.
            timed_s: seconds of timed windows that a verdict of each draft count takes.
        """
        every, room_s = self._left, self.seconds - self.spent_s
        unit_s = (gate_s + timed_s) / size_weight(size)
        choices = [every, sorted({every[0], size}), [size]]
        fitting = (c for c in choices if unit_s * _weight(c) <= room_s)
        stuck = gate_s > MAX_GATE_SHARE * room_s
        self._left = every[:1] if stuck else next(fitting, [size])
        if len(every) == 1 and not stuck:
            return None
        what, need_s = _named(every), unit_s * _weight(every)
        if stuck:
            what, need_s = f"the gate of {plural(size, 'request')}", gate_s
        text = f"time: {what} will take about {clock(need_s)}, and {clock(room_s)} is left"
        out = [each for each in every if each not in self._left]
        if not out and not stuck:
            return text
        minutes = -(-(self.spent_s + unit_s * _weight(every)) // 60)
        without = f": without {_named(out)}" if out else ""
        return f"{text}{without} (enough: --time-budget {minutes:.0f}m)"


def _weight(sizes: Sequence[int]) -> float:
    return sum(map(size_weight, sizes))


def _named(sizes: Sequence[int]) -> str:
    return f"{joined([str(each) for each in sizes])} request{'' if sizes == [1] else 's'}"
