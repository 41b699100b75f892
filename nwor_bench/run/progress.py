"""Progress output: a live table with a row per cell, or plain lines without a terminal."""

import time
from datetime import timedelta
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nwor_bench.records.batch import IN_TURNS
from nwor_bench.records.types import BatchRecord, Cell, Phase


class Progress(Protocol):
    """Receives a run's progress."""

    def say(self, line: str) -> None:
        """A step that happens once: start-up, the gate's outcome."""

    def batch_done(self, cell: Cell, record: BatchRecord) -> None:
        """A batch of a cell has ended."""

    def step(self, now: str, then: str) -> None:
        """What begins now, and what comes after it."""

    def leading(self, ratio: str) -> None:
        """The ratio of the leading cell so far, after each block."""


class PlainProgress:
    """One line per event, for logs and CI."""

    def __init__(self, console: Console, num_batches: int):
        self._console = console
        self._num_batches = num_batches
        self._done = 0
        self._blocks = 0
        self._next_ratio = 3

    def step(self, now: str, then: str) -> None:
        """Nothing: the batches' lines say what runs."""

    def leading(self, ratio: str) -> None:
        """Print the ratio after 3, 6, 12 and so on blocks: a log needs no line each."""
        self._blocks += 1
        if self._blocks == self._next_ratio:
            self._next_ratio *= 2
            self.say(f"leading so far: {ratio}")

    def __enter__(self) -> "PlainProgress":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, line: str) -> None:
        """Print the line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def batch_done(self, cell: Cell, record: BatchRecord) -> None:
        """Print the batch's numbers."""
        self._done += 1
        self._num_batches = max(self._num_batches, self._done)  # probed batches were not foreseen
        where, who = _place(cell, record)
        self.say(
            f"[{self._done:{len(str(self._num_batches))}}/{self._num_batches}] "
            f"{where:8} {who:16} "
            f"{record.latency_ms / 1e3:6.2f} s  {record.tokens_per_s:6.0f} tokens/s  "
            f"accepted {record.accepted_tokens}/{record.draft_tokens}"
            + (f"  parity {record.parity}" if record.parity else "")
        )


def _place(cell: Cell, record: BatchRecord) -> tuple[str, str]:
    """What the batch belongs to, and whose it is: all cells' where they take turns."""
    who = "all cells in turn" if record.phase in IN_TURNS else cell.label
    is_block = record.phase in (Phase.TIMED, Phase.INTERLEAVED)
    phase = Phase.GATE if record.phase == Phase.INTERLEAVED_GATE else record.phase
    return f"block {record.block}" if is_block else str(phase), who


class LiveProgress:
    """A table that updates in place, with one row per cell.

    Args:
        console: a terminal.
        cells: the rows.
        num_batches: the most that may run.
        budget_s: the run's time budget, which begins when the engine has started; None for none.
    """

    def __init__(
        self,
        console: Console,
        cells: tuple[Cell, ...],
        num_batches: int,
        budget_s: float | None = None,
    ):
        self._console = console
        self._budget_s = budget_s
        self._rows: dict[str, list[str]] = {cell.label: ["waiting", "", "", ""] for cell in cells}
        self._num_batches = num_batches
        self._done = 0
        self._began = time.monotonic()
        self._first_batch: float | None = None
        self._step = ""
        self._ratio = ""
        self._live = Live(
            get_renderable=self._table, console=console, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> "LiveProgress":
        self._live.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, line: str) -> None:
        """Print the line above the table."""
        self._console.print(line, highlight=False, markup=False)

    def batch_done(self, cell: Cell, record: BatchRecord) -> None:
        """Update the cell's row."""
        if self._first_batch is None:  # the engine's start is no measure of what is left
            self._first_batch = time.monotonic() - record.latency_ms / 1e3
        self._done += 1
        self._num_batches = max(self._num_batches, self._done)  # probed batches were not foreseen
        where, who = _place(cell, record)
        self._rows[who] = [
            where,
            f"{record.latency_ms / 1e3:.2f} s",
            f"{record.tokens_per_s:.0f}",
            f"{record.accepted_tokens}/{record.draft_tokens}",
        ]
        self._live.refresh()

    def step(self, now: str, then: str) -> None:
        """Show it below the table."""
        self._step = f"now: {now}; next: {then}"
        self._live.refresh()

    def leading(self, ratio: str) -> None:
        """Show it below the table."""
        self._ratio = f"leading so far: {ratio}"
        self._live.refresh()

    def _table(self) -> Table:
        title = f"{self._done} of at most {self._num_batches:,} batches, {self._clock()}"
        below = "\n".join(filter(None, (self._step, self._ratio)))
        table = Table("cell", "last batch", "latency", "tokens/s", "accepted", title=title,
                      caption=Text(below), caption_justify="left")  # fmt: skip
        for label, row in self._rows.items():
            table.add_row(label, *row)
        return table

    def _clock(self) -> str:
        """`0:01:10 elapsed, at most 0:02:05 left`."""
        now = time.monotonic()
        told = f"{_duration(now - self._began)} elapsed"
        if self._first_batch is None:
            return told
        spent = now - self._first_batch
        left = spent / self._done * (self._num_batches - self._done)
        if self._budget_s is not None:
            left = min(left, max(0.0, self._budget_s - spent))
        return f"{told}, at most {_duration(left)} left"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def make_progress(
    console: Console, cells: tuple[Cell, ...], num_batches: int, budget_s: float | None = None
) -> PlainProgress | LiveProgress:
    """Live on a terminal, plain lines elsewhere."""
    if console.is_terminal:
        return LiveProgress(console, cells, num_batches, budget_s)
    return PlainProgress(console, num_batches)
