"""What a run prints: progress, the ratio so far, and the result as text or JSON."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.groups import find_groups
from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.analysis.statistics import geometric_mean_ratio, paired_ratio
from nwor_bench.instruments.versions import require_supported_vllm, untried_version
from nwor_bench.records.batch import INTERLEAVED_PHASES
from nwor_bench.records.files import result_document
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, Cell, NworMode, Phase, WindowRecord
from nwor_bench.report.files import run_result
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.run.run_options import RunOptions

_TIMED = (Phase.TIMED, Phase.INTERLEAVED)


class RunningRatio:
    """Ratios of each block, for the terminal alone: windows of whole batches are not matched as in
    the report, and the interval is the cell's own.

    Args:
        run: what an earlier start measured.
    """

    def __init__(self, run: RunData):
        self._blocks: dict[Phase, dict[int, dict[Cell, float]]] = {each: {} for each in _TIMED}
        windows = windows_by_batch(run)
        for batch in run.batches:
            self.add(batch, windows[batch_key(batch)])

    def add(self, batch: BatchRecord, windows: Iterable[WindowRecord]) -> None:
        """Take in a batch that has ended; those that are not timed are left out."""
        if batch.phase not in _TIMED:
            return
        times = _in_turns(windows) if batch.phase == Phase.INTERLEAVED else _whole(windows)
        self._blocks[batch.phase].setdefault(batch.block, {}).update(times)

    def leading(self, live: Iterable[Cell]) -> str | None:
        """`stage x graph 0.974 [0.968, 0.980] of off x off, 12 blocks`, the lowest ratio of the
        live cells; None before a block has ended. Of cells without NWOR only if there are no
        others."""
        cells = [cell for cell in live if not cell.is_baseline and cell.arm is None]
        staged = [cell for cell in cells if cell.nwor_mode is not NworMode.OFF]
        rated = [(pairs, cell) for cell in staged or cells if (pairs := self._pairs(cell))]
        if not rated:
            return None
        pairs, cell = min(rated, key=lambda own: geometric_mean_ratio(*own[0]))
        blocks = len(pairs[0])
        found = paired_ratio(*pairs)
        if found is None:
            ratio = f"{geometric_mean_ratio(*pairs):.3f}"
        else:
            ratio = f"{found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}]"
        return f"{cell.label} {ratio} of off x off, {blocks} block{'s' if blocks > 1 else ''}"

    def _pairs(self, cell: Cell) -> tuple[list[float], list[float]] | None:
        """Its times and those of off x off, block by block; interleaved ones if there are any."""
        for phase in (Phase.INTERLEAVED, Phase.TIMED):
            both = [
                (own[cell], base)
                for own in self._blocks[phase].values()
                if cell in own and (base := _baseline(own)) is not None
            ]
            if both:
                ours, theirs = zip(*both, strict=True)
                return list(ours), list(theirs)
        return None


def _baseline(block: dict[Cell, float]) -> float | None:
    return next((ms for cell, ms in block.items() if cell.is_baseline), None)


def _whole(windows: Iterable[WindowRecord]) -> dict[Cell, float]:
    """Mean window time of each cell."""
    times: dict[Cell, list[float]] = {}
    for window in windows:
        if window.wall_ms is not None:
            times.setdefault(window.cell, []).append(window.wall_ms)
    return {cell: fmean(own) for cell, own in times.items()}


def _in_turns(windows: Iterable[WindowRecord]) -> dict[Cell, float]:
    """Each cell's time in units of that of off x off, from the groups that both share."""
    effects: dict[Cell, list[float]] = {}
    times: dict[Cell, float] = {}
    for group in find_groups(windows).counted:
        if group.pair.reference.is_baseline:
            times[group.pair.reference] = 1.0
            effect = group.host if group.device is None else group.device
            effects.setdefault(group.pair.treated, []).append(effect)
    return times | {cell: exp(fmean(own)) for cell, own in effects.items()}


def tell_json(content: Mapping[str, Any]) -> None:
    """Print one JSON document, headed by its version and ours."""
    sys.stdout.write(result_document(content))


def console_for(options: RunOptions) -> Console:
    """The console for progress and steps, which --quiet and --json leave out."""
    return Console(quiet=options.quiet or options.as_json)


def check_vllm_version(console: Console) -> None:
    """Print a line if this vLLM was not tried. Raises UnsupportedVllmError."""
    require_supported_vllm()
    untried = untried_version()
    if untried is not None:
        console.print(untried, style="yellow", highlight=False, markup=False)


def tell_result(
    console: Console,
    options: RunOptions,
    analysis: Analysis,
    folder: Path,
    *,
    in_sweep: bool,
) -> None:
    """Print a run's result; the runs of a sweep are in the sweep's own JSON."""
    if options.as_json:
        if not in_sweep:
            tell_json(run_result(analysis, folder))
        return
    shown = Console() if options.quiet else console
    document = summary(analysis, verbose=options.verbose)
    print_document(shown, document, quiet=options.quiet)
    print_path(shown, "Run folder", folder)


def tell_plan(options: RunOptions, lines: Sequence[str]) -> None:
    """Print what --dry-run found, which is its answer with --quiet too."""
    if options.as_json:
        tell_json({"plan": list(lines)})
        return
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False)


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
    who = "all cells in turn" if record.phase in INTERLEAVED_PHASES else cell.label
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
