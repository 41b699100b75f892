"""Which cell each window of an interleaved batch, or of a server, belongs to. Pure.

Two cells are interleaved in a group of four runs, A B B A or B A A B: whatever drifts at a constant
rate during the group weighs equally on both. Runs are a few windows long; the length is drawn for
each group, so that the records show whether it matters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from nwor_bench.records.types import SETTLING, Cell, NworMode, ScvMode

RUN_LENGTHS = {2: 4, 4: 1}
"""Windows of a run, and how often such a run is drawn; the first of each run settles and is not
compared.

Window times drift: on a busy host adjacent windows correlate by 0.7, windows four apart by 0.3. So
two cells must alternate quickly. Labelled as if they were two cells, 3,000 stock windows of an H200
(8 requests) give an interval of +- 0.30 % with runs of 2, 0.46 % with 4 and 0.67 % with 8. One run
in five is of 4, so that 75 groups of a pair show whether what a switch leaves behind fades with the
length of a run (`stats.robust.MIN_APART` of the rarer length), and 100 groups take 960
windows.
"""

BRIEF = {1: 1}
"""Run lengths of a batch that is not timed: every change of cells in as few windows as possible, so
that a short batch has all cells."""

DRAFT_RUN_LENGTHS = {3: 4, 4: 1}
"""Run lengths of draft counts: neither end of a run counts (`compared`). For the same number
of windows, groups then scatter by 0.8 to 1.3 times as much as those of runs of 2, which hold only
windows beside a switch (windows of an H200, and simulated ones that correlate by 0, 0.73 and 0.95).
Runs of 4 scatter less on a host's clock (0.8 against 1.3), but more groups of 3 fit into a batch of
64 tokens."""

SERVER_RUN_LENGTHS = {2: 1}
"""Run lengths in a server: a group of eight is the shortest, and mostly ends before a prefill."""

SERVER_DRAFT_RUN_LENGTHS = {3: 1}
"""Run lengths of draft counts in a server: the shortest with a window that counts."""

SERVER_SEED = "live"
"""Every tensor-parallel rank draws the same order."""

_ABBA = (0, 1, 1, 0)

RUNS_OF_GROUP = len(_ABBA)
"""Runs of a group."""

WAIT = SETTLING - 1
"""Steps left out after one that does more than verify windows; a group's first is not used either.
"""


def compared(run_length: int, *, counts: bool) -> range:
    """Positions of a run that are compared: not the first, which follows a switch; if draft counts
    alternate, nor the last, whose drafter works for the next run (in older runs of two only that).
    """
    return range(min(1, run_length - 2), run_length - 1) if counts else range(1, run_length)


@dataclass(frozen=True)
class WindowPlace:
    """One window's place in its batch; see `WindowRecord`."""

    cell: int
    """Number of its cell."""
    group: int
    run: int
    run_length: int
    position: int

    @property
    def is_last(self) -> bool:
        """True for the last window of its group."""
        return self.run == RUNS_OF_GROUP - 1 and self.position == self.run_length - 1


@dataclass(frozen=True)
class WindowOrder:
    """The order of an interleaved batch: plain values, so that every worker can be given it."""

    cells: tuple[Cell, ...]
    """The interleaved cells."""
    pairs: tuple[tuple[int, int], ...]
    """Numbers of the cells that are compared with each other."""
    seed: str
    """Seed of the pairs' order, the runs' lengths and who begins."""
    untimed: bool = False
    """Runs are of one window, so that a short batch of the gate runs all cells."""

    @property
    def stages(self) -> bool:
        """True if a cell's mode is not off, so that its windows may be staged."""
        return any(cell.nwor_mode is not NworMode.OFF for cell in self.cells)

    @property
    def drafts(self) -> tuple[int, ...] | None:
        """Draft count of each cell, the A/A arm's being 0; None if modes are interleaved."""
        counts = tuple(cell.fixed_drafts for cell in self.cells)
        return counts if any(cell.drafts is not None for cell in self.cells) else None

    @property
    def run_lengths(self) -> Mapping[int, int]:
        """Windows of a run, and how often such a run is drawn."""
        return BRIEF if self.untimed else DRAFT_RUN_LENGTHS if self.drafts else RUN_LENGTHS

    def places(self) -> Iterator[WindowPlace]:
        """Every window's place, without end."""
        return places_of(self.pairs, self.seed, self.run_lengths)


PLACE = "nwor_place"
"""If draft counts are interleaved: attribute of each step's SchedulerOutput, its `WindowPlace`, or
None. So workers need no order of their own."""

UNDELIVERED = "nwor_undelivered"
"""In a server whose draft counts alternate: attribute of the SchedulerOutput of a step with drafts,
the tokens that requests sampled behind their last one, since the step with drafts before."""


def places_of(
    pairs: Sequence[tuple[int, int]], seed: str, run_lengths: Mapping[int, int] = RUN_LENGTHS
) -> Iterator[WindowPlace]:
    """Places of the pairs, every pair once in each round; the same seed gives the same places.

    Args:
        pairs: numbers of the cells that are compared.
        seed: of the order.
        run_lengths: windows of a run, and how often such a run is drawn. Each pair draws from a
            bag of its own that is refilled when empty, so that few groups have their share too.
    """
    draw = Random(seed)
    bags: dict[tuple[int, int], list[int]] = {pair: [] for pair in pairs}
    group = 0
    while True:
        for first, second in draw.sample(pairs, len(pairs)):
            bag = bags[first, second]
            if not bag:
                bag += [length for length, often in run_lengths.items() for _ in range(often)]
                draw.shuffle(bag)
            length = bag.pop()
            cells = (first, second) if draw.random() < 0.5 else (second, first)
            yield from places_of_group(cells, group, length)
            group += 1


def places_of_group(cells: tuple[int, int], group: int, length: int) -> list[WindowPlace]:
    """Places of one group, A B B A, in runs of that many windows."""
    return [
        WindowPlace(cells[which], group, run, length, position)
        for run, which in enumerate(_ABBA)
        for position in range(length)
    ]


def is_windows(tokens: int, drafts: int, requests: int) -> bool:
    """True if a step only verifies windows: each request runs its drafts and the token before."""
    return requests > 0 and tokens == drafts + requests


def only_verifies(step: Any) -> bool:
    """True for a step that only verifies windows; one without any draft is k = 0, which is a window
    if draft counts are interleaved.

    Args:
        step: vLLM's SchedulerOutput.
    """
    drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
    if not is_windows(step.total_num_scheduled_tokens, drafts, len(step.num_scheduled_tokens)):
        return False
    return drafts > 0 or (hasattr(step, PLACE) and not step.scheduled_new_reqs)


class Order:
    """The places of a batch or a server in turn, none for steps that settle.

    Attributes:
        at: the place to be taken next.
        coming: the one behind it.
        settling: steps that are left out before the next place.
    """

    def __init__(self, places: Iterator[WindowPlace], *, wait: int = WAIT, settling: int = 0):
        self._places = places
        self._wait = wait
        self.at, self.coming = next(places), next(places)
        self.settling = settling

    def settles(self, only_verifies: bool) -> bool:
        """True if a step has no place: it does more than verify windows, or comes soon after such a
        step. Call it once for every step."""
        if not only_verifies:
            self.settling = self._wait
            return True
        if self.settling:
            self.settling -= 1
            return True
        return False

    def take(self) -> WindowPlace:
        """The next place."""
        taken, self.at, self.coming = self.at, self.coming, next(self._places)
        return taken

    def skip(self) -> None:
        """Leave the rest of a group of which a place was taken."""
        group, begun = self.at.group, self.at.run or self.at.position
        while begun and self.at.group == group:
            self.take()


def compared_pairs(cells: Sequence[Cell]) -> tuple[tuple[int, int], ...]:
    """Off x off with every other cell, and the control with one cell that stages. A staged draft
    count is compared with the same count in mode off, if that is among the cells.

    The control's cell is the one with the SCV mode that waits least for the host: the control has
    nothing to validate, so the difference is what staging, validating and committing cost beside
    writing.
    """
    baseline = next(n for n, cell in enumerate(cells) if cell.is_baseline)
    numbers: dict[Cell | None, int] = {cell: n for n, cell in enumerate(cells)}
    pairs = [
        (numbers.get(cell.stock_twin, baseline), n) for n, cell in enumerate(cells) if n != baseline
    ]
    control = [n for n, cell in enumerate(cells) if cell.nwor_mode is NworMode.CONTROL]
    staged = [n for n, cell in enumerate(cells) if cell.nwor_mode is NworMode.STAGE]
    if control and staged:
        preferred = (ScvMode.GRAPH, ScvMode.ADAPTIVE, ScvMode.OFF)
        quickest = min(staged, key=lambda n: preferred.index(cells[n].scv_mode))
        pairs.append((control[0], quickest))
    return tuple(pairs)


ALL = "all"
"""The class of groups of any batch size."""


def size_class(num_reqs: int) -> str:
    """`1`, `2`, `3-4`, `5-8`, ...: batch sizes up to a power of two, from half of it on."""
    if num_reqs <= 2:
        return str(num_reqs)
    most = 1 << (num_reqs - 1).bit_length()
    return f"{most // 2 + 1}-{most}"
