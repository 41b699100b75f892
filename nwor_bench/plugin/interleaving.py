"""Cells are interleaved within a batch: the hook's modes change between two windows.

A switch is cheap, because everything that a mode needs was made when it was first set: under full
CUDA graphs another graph replays, eagerly the target layers' methods are swapped. Every rank draws
the same turns from the same seed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.types import NworMode, ScvMode
from nwor_bench.workload.window_order import RUN_LENGTHS, Turn, turns_of


@dataclass
class TurnsOfCell:
    """An interleaved cell, and its validator's counters between its turns."""

    nwor_mode: NworMode
    scv_mode: ScvMode
    sham: Counter[str] | None = None
    """Windows of a sham: `SWITCHED`, or why they ran as plain off; None for another cell."""

    counters: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


class Interleaving:
    """The turns of one batch; `live.turns` has those of a server.

    Args:
        hook: of the runner whose windows are interleaved.
        cells: NWOR and SCV mode of each cell; "sham" is off with the switching of stage.
        pairs: numbers of the cells that are compared.
        seed: of the order.
        run_lengths: windows of a run, and how often such a run is drawn.
    """

    alarm: str | None = None
    """Why this rank wants no window staged any more; sent with the next staged window's vote."""

    def __init__(
        self,
        hook: RunnerHook,
        cells: Sequence[tuple[str, str]],
        pairs: Sequence[tuple[int, int]],
        seed: str,
        run_lengths: Mapping[int, int] = RUN_LENGTHS,
    ):
        self._hook = hook
        self.cells = [
            TurnsOfCell(NworMode.OFF, ScvMode(scv), Counter())
            if nwor == SHAM
            else TurnsOfCell(NworMode(nwor), ScvMode(scv))
            for nwor, scv in cells
        ]
        self._why_no_sham: str | None = None
        self._turns: Iterator[Turn] = turns_of([(a, b) for a, b in pairs], seed, run_lengths)
        self._current: int | None = None

    def start(self) -> None:
        """Interleave the cells from now on.

        Every mode is set once first, since that may capture CUDA graphs.
        """
        for cell in self.cells:
            self._hook.set_modes(cell.nwor_mode, cell.scv_mode)
        self._hook.set_modes(NworMode.OFF, ScvMode.OFF)
        if any(cell.sham is not None for cell in self.cells):
            self._why_no_sham = self._hook.prepare_sham()
        self._hook.interleave(self)

    def next(self, scheduler_output: Any) -> Turn | None:
        """The turn of the step that begins; None for a step with more than windows.

        Switches the hook's modes if the turn is another cell's. Called for every step.
        """
        if not is_windows_alone(scheduler_output):
            return None
        return self._take(next(self._turns))

    def sham_fell_back(self, reason: str) -> None:
        """The window in flight cannot run as a sham: it runs as plain off."""
        sham = None if self._current is None else self.cells[self._current].sham
        if sham is not None:
            sham[SWITCHED] -= 1
            sham[reason] += 1

    def ended(self, fallback_reason: str | None) -> None:
        """A window has ended; `fallback_reason` is the ranks' common one."""

    def _take(self, turn: Turn) -> Turn:
        cell = self.cells[turn.cell]
        if cell.sham is not None:
            cell.sham[self._why_no_sham or SWITCHED] += 1
        if turn.cell != self._current:
            self._current = turn.cell
            if cell.sham is not None and self._why_no_sham is None:
                self._hook.take_sham_turn()
            else:
                self._hook.take_turn(cell.nwor_mode, cell.scv_mode)
            validator = self._hook.validator
            validator.counters, validator.fallbacks = cell.counters, cell.fallbacks
        return turn

    def facts(self) -> list[dict[str, dict[str, int]]]:
        """Each cell's SCV counters, in the cells' order, and a sham's windows by outcome."""
        return [
            {"scv_counters": dict(cell.counters), "scv_fallbacks": dict(cell.fallbacks)}
            | ({} if cell.sham is None else {SHAM: dict(cell.sham)})
            for cell in self.cells
        ]


def is_windows_alone(scheduler_output: Any) -> bool:
    """True for a step in which each request runs only its drafts and the token before."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    tokens = sum(map(len, drafts.values())) + len(scheduler_output.num_scheduled_tokens)
    return bool(drafts) and scheduler_output.total_num_scheduled_tokens == tokens
