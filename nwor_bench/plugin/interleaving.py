"""Cells are interleaved within a batch or in a server: the modes change between two windows.

A switch is cheap: under full CUDA graphs another graph replays. The target layers' methods are
swapped only before a forward that calls them. Every rank draws the same order from the same seed.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.fallback_reasons import Fault, Guard, fault_of, in_words
from nwor_bench.records.types import NworMode, ScvMode, WindowRecord
from nwor_bench.records.window_order import (
    PLACE,
    SERVER_RUN_LENGTHS,
    SERVER_SEED,
    WAIT,
    Order,
    WindowPlace,
    places_of,
)

logger = logging.getLogger("vllm.nwor_bench")


@dataclass
class InterleavedCell:
    """An interleaved cell, and its validator's counters between its windows."""

    nwor_mode: NworMode
    scv_mode: ScvMode
    sham: Counter[str] | None = None
    """Windows of a sham: `SWITCHED`, or why they ran as plain off; None for another cell."""

    counters: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


class ModeSwitch:
    """Sets the hook's modes, between two windows, to those of each step's cell.

    Args:
        cells: NWOR and SCV mode of each cell; "sham" is off with the switching of stage.
        order: of the places; None if the scheduler has it, and each step brings its place (PLACE):
            modes are then switched only if a cell stages.
    """

    alarm: str | None = None
    """Why this rank wants no window staged any more; sent with the next staged window's vote."""

    def __init__(
        self, hook: RunnerHook, cells: Sequence[tuple[str, str]] = (), order: Order | None = None
    ):
        self._hook = hook
        self.cells = [
            InterleavedCell(NworMode.OFF, ScvMode(scv), Counter())
            if nwor == SHAM
            else InterleavedCell(NworMode(nwor), ScvMode(scv))
            for nwor, scv in cells
        ]
        self._order = order
        self._switches = any(cell.nwor_mode is not NworMode.OFF for cell in self.cells)
        self._why_no_sham: str | None = None
        self._current: int | None = None

    def start(self) -> None:
        """Interleave the cells from now on; first set every mode once: that may capture graphs."""
        for cell in self.cells:
            self._hook.set_modes(cell.nwor_mode, cell.scv_mode)
        self._hook.set_modes(NworMode.OFF, ScvMode.OFF)
        if any(cell.sham is not None for cell in self.cells):
            self._why_no_sham = self._hook.prepare_sham()
        self._hook.interleave(self)

    def next(self, scheduler_output: Any, only_verifies: bool) -> WindowPlace | None:
        """The place of the step that begins, after switching to its cell's modes; None for a step
        with more than windows, and while settling. Called for every step."""
        if self._order is None:
            place: WindowPlace | None = getattr(scheduler_output, PLACE, None)
            if not self._switches:
                return place
        else:
            place = None if self._order.settles(only_verifies) else self._order.take()
        if place is None:
            self._leave()
        else:
            self.enter(place.cell)
        return place

    def enter(self, number: int) -> None:
        """Run the step that begins in this cell's modes."""
        cell = self.cells[number]
        if cell.sham is not None:
            cell.sham[self._why_no_sham or SWITCHED] += 1
        if number != self._current:
            self._current = number
            self._switch(cell)

    def _leave(self) -> None:
        """Run a step without a place in mode off: its window is recorded as off x off."""
        if self._current is not None:
            self._current = None
            self._switch(InterleavedCell(NworMode.OFF, ScvMode.OFF))

    def sham_fell_back(self, reason: str) -> None:
        """The window in flight cannot run as a sham: it runs as plain off."""
        sham = None if self._current is None else self.cells[self._current].sham
        if sham is not None:
            sham[SWITCHED] -= 1
            sham[reason] += 1

    def ended(self, fallback_reason: str | None) -> None:
        """A window has ended; `fallback_reason` is the ranks' common one."""

    def _switch(self, cell: InterleavedCell) -> None:
        """Switch the hook to a cell, and let its validator count there."""
        if cell.sham is not None and self._why_no_sham is None:
            self._hook.switch_to_sham()
        else:
            self._hook.switch_to(cell.nwor_mode, cell.scv_mode)
        validator = self._hook.validator
        validator.counters, validator.fallbacks = cell.counters, cell.fallbacks

    def facts(self) -> list[dict[str, dict[str, int]]]:
        """Each cell's SCV counters, in the cells' order, and a sham's windows by outcome."""
        return [
            {"scv_counters": dict(cell.counters), "scv_fallbacks": dict(cell.fallbacks)}
            | ({} if cell.sham is None else {SHAM: dict(cell.sham)})
            for cell in self.cells
        ]


_GUARDS = {
    Fault.COMMIT: Guard.COMMIT_REFUSED,
    Fault.DEVICE_REFUSED: Guard.COMMIT_REFUSED,
    Fault.STAGING_STOPPED: Guard.COMMIT_REFUSED,
    Fault.COUNTS: Guard.COUNTS,
    Fault.RANKS_DIFFER: Guard.RANKS_DIFFER,
}
"""Faults after which staging stops for good in a server."""


def miscount(window: WindowRecord) -> str | None:
    """Which counts of a window do not add up; None if all do."""
    staged, committed = window.staged_tokens, window.committed_tokens
    rejected, accepted = window.rejected_tokens, window.accepted_tokens
    if accepted > window.draft_tokens:
        return "accepted_more_than_drafted"
    if staged != committed + rejected or min(committed, rejected) < 0:
        return "staged_is_not_committed_and_rejected"
    if staged > window.draft_tokens:
        return "staged_more_than_drafted"
    if staged and committed != accepted:
        return "committed_is_not_accepted"
    return None


PAIRS = [(0, 1)] * 4 + [(0, 2)]
"""Cells of a server: off, stage, and off again: one group in five compares off with itself."""


class LiveModes(ModeSwitch):
    """Off, and stage with `scv_mode`, in a server: a guard may stop staging for good.

    Requests come and go: a step that does more than verify windows ends a group, and the rest of
    the group is skipped. The order does not depend on the traffic, so the same share is left out of
    both modes.

    Attributes:
        stopped: the guard that stopped staging for good; None while off and stage are interleaved.
    """

    def __init__(self, hook: RunnerHook, scv_mode: ScvMode):
        off = (NworMode.OFF, ScvMode.OFF)
        places = places_of(PAIRS, SERVER_SEED, SERVER_RUN_LENGTHS)
        self._places = Order(places, settling=WAIT)
        super().__init__(hook, [off, (NworMode.STAGE, scv_mode), off], self._places)
        self.stopped: Guard | None = None
        self._is_off = False

    def next(self, scheduler_output: Any, only_verifies: bool) -> WindowPlace | None:
        """The step's place; None, in the last mode, for more than windows and while settling."""
        if self.stopped is None:
            return super().next(scheduler_output, only_verifies)
        if not self._is_off:  # between two steps; on every rank before the same one
            self._is_off = True
            self._hook.set_modes(NworMode.OFF, ScvMode.OFF)
        return None

    def _leave(self) -> None:
        """Stay in the last mode, and skip the rest of its group."""
        self._places.skip()

    def ended(self, fallback_reason: str | None) -> None:
        """A window has ended: all ranks stop staging if their common reason shows a guard."""
        fault = None if fallback_reason is None else fault_of(fallback_reason)
        guard = None if fault is None else _GUARDS.get(fault)
        if guard is None or self.stopped is not None:
            return
        self.stopped, self.alarm = guard, None
        logger.error(
            "nwor: %s (%s). That window was written directly. Staging has stopped for good; the "
            "server goes on in mode off. Report this: no request can cause it",
            in_words(guard),
            fallback_reason,
        )

    def check(self, window: WindowRecord) -> None:
        """Raise the alarm if a window's counts do not add up."""
        problem = miscount(window)
        if problem is not None:
            self._raise(problem, window)

    def overcounted(self) -> None:
        """A request got more tokens than its drafts and one."""
        self._raise("accepted_more_than_drafted", None)

    def _raise(self, problem: str, window: WindowRecord | None) -> None:
        if self.stopped is None and self.alarm is None:
            self.alarm = f"{Guard.COUNTS}:{problem}"
            logger.error(
                "nwor: counts of a window do not add up: %s; %s. If fewer tokens were committed "
                "than accepted, answers of the last second may be wrong, and later ones that hit "
                "their blocks in the prefix cache: restart the server",
                problem,
                window,
            )
