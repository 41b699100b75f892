"""A run's output: progress, plan, and the result as text or JSON."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.instruments.versions import require_supported_vllm, untried_version
from nwor_bench.records.files import result_document
from nwor_bench.records.types import INTERLEAVED_PHASES, BatchRecord, Phase
from nwor_bench.report.load import REPORT_PAGE, run_result
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.report.text import clock
from nwor_bench.run.run_options import Heartbeat, RunOptions


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
    console: Console, options: RunOptions, analysis: Analysis, folder: Path, *, in_sweep: bool
) -> None:
    """Print a run's result; the runs of a sweep are in the sweep's own JSON."""
    if options.as_json:
        if not in_sweep:
            tell_json(run_result(analysis, folder))
        return
    by_drafts = analysis.run.header.spec.draft_counts is not None
    if in_sweep and by_drafts:  # the sweep's answer is theirs together
        print_path(console, "Run folder", folder)
        return
    shown = Console() if options.quiet else console
    document = summary(analysis, verbose=options.verbose)
    print_document(shown, document, quiet=options.quiet)
    print_path(shown, "Report", folder / REPORT_PAGE)


def tell_plan(options: RunOptions, lines: Sequence[str]) -> None:
    """Print what --dry-run found, which is its answer with --quiet too."""
    if options.as_json:
        tell_json({"plan": list(lines)})
        return
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False)


BAR = 20
"""Columns of the bar."""


class Progress:
    """A line for each step and batch of the gate; a bar on a terminal, elsewhere a line for every
    QUIET_S without one, each with the time that the run takes.

    Args:
        console: where it prints.
        heartbeat: shows that a step goes on if no terminal does.
    """

    def __init__(self, console: Console, heartbeat: Heartbeat | None = None):
        self._console = console
        self._heartbeat = heartbeat
        self._began = time.monotonic()
        self._clock: Callable[[], tuple[float, float | None]] | None = None
        self._doing = "starting"
        # What libraries write to stderr stays there: vLLM's log takes it.
        self._live = Live(
            Spinner("dots", self), console=console, transient=True, redirect_stderr=False
        )

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._live.start()
        elif self._heartbeat is not None:
            self._heartbeat.shown = self._text
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __rich__(self) -> Table:
        """What a terminal shows beside the spinner, drawn several times a second."""
        line = Table.grid(padding=(0, 1))
        spent, total = self._times()
        text = Text(self._text(), overflow="ellipsis", no_wrap=True)
        line.add_row(*([ProgressBar(total, min(spent, total), BAR)] if total else []), text)
        return line

    @contextmanager
    def timed(self, times: Callable[[], tuple[float, float | None]]) -> Iterator[None]:
        """Inside, times are seconds spent, and those of all that is to be done, None if unknown."""
        self._clock = times
        yield
        self._clock = None

    def _times(self) -> tuple[float, float | None]:
        return (time.monotonic() - self._began, None) if self._clock is None else self._clock()

    def _text(self) -> str:
        spent, total = self._times()
        most = f" of about {clock(total)}" if total else ""
        return f"{self._doing}, {clock(spent)}{most}"

    def doing(self, what: str) -> None:
        """Show what is being done, for as long as nothing else is."""
        self._doing = what
        if self._heartbeat is not None:
            self._heartbeat.note(what)

    def say(self, line: str) -> None:
        """Print a step that happens once: start-up, the gate's outcome; in a log as one line."""
        in_one = not self._console.is_terminal
        self._console.print(line, highlight=False, markup=False, soft_wrap=in_one)
        if self._heartbeat is not None:
            self._heartbeat.note()

    def batch_done(self, label: str, record: BatchRecord) -> None:
        """Show the numbers of a gate's batch in a log; other batches are counted by block."""
        is_gate = record.phase in (Phase.GATE, Phase.INTERLEAVED_GATE)
        if is_gate and not self._console.is_terminal:
            self.say(
                f"gate: {'interleaved' if record.phase in INTERLEAVED_PHASES else label:16} "
                f"{record.latency_ms / 1e3:6.2f} s  "
                f"accepted {record.accepted_tokens}/{record.draft_tokens}"
                + (f"  parity {record.parity}" if record.parity else "")
            )
