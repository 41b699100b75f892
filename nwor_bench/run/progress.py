"""A run's output: progress, plan, and the result as text or JSON."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.instruments.versions import require_supported_vllm, untried_version
from nwor_bench.records.files import result_document
from nwor_bench.records.types import INTERLEAVED_PHASES, BatchRecord, Cell, Phase
from nwor_bench.report.load import run_result
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
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
    print_path(shown, "Run folder", folder)


def tell_plan(options: RunOptions, lines: Sequence[str]) -> None:
    """Print what --dry-run found, which is its answer with --quiet too."""
    if options.as_json:
        tell_json({"plan": list(lines)})
        return
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False)


class Progress:
    """A line for each step, batch of the gate, and block.

    On a terminal the batches and blocks share one line, updated in place.

    Args:
        console: where it prints.
        heartbeat: shows that a step goes on if no terminal does.
    """

    def __init__(self, console: Console, heartbeat: Heartbeat | None = None):
        self._console = console
        self._heartbeat = heartbeat
        self._began = time.monotonic()
        self._spent: Callable[[], float] | None = None
        self._most = ""
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
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def __rich__(self) -> Text:
        """The line that a terminal shows beside the spinner, drawn several times a second."""
        return Text(f"{self._doing}, {self._time()}", overflow="ellipsis", no_wrap=True)

    @contextmanager
    def timed(self, spent_s: Callable[[], float], budget_s: float | None) -> Iterator[None]:
        """Inside, times are seconds spent of a budget."""
        self._spent, self._most = spent_s, f" of at most {_clock(budget_s)}" if budget_s else ""
        yield
        self._spent, self._most = None, ""

    def _time(self) -> str:
        spent = time.monotonic() - self._began if self._spent is None else self._spent()
        return f"{_clock(spent)}{self._most}"

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

    def batch_done(self, cell: Cell, record: BatchRecord) -> None:
        """Show the numbers of a gate's batch in a log; other batches are counted by block."""
        is_gate = record.phase in (Phase.GATE, Phase.INTERLEAVED_GATE)
        if is_gate and not self._console.is_terminal:
            self.say(
                f"gate: {'interleaved' if record.phase in INTERLEAVED_PHASES else cell.label:16} "
                f"{record.latency_ms / 1e3:6.2f} s  "
                f"accepted {record.accepted_tokens}/{record.draft_tokens}"
                + (f"  parity {record.parity}" if record.parity else "")
            )

    def block_done(self, number: int) -> None:
        """Show in a log how far the run is."""
        if not self._console.is_terminal:
            self.say(f"block {number} done, {self._time()}")


def _clock(seconds: float) -> str:
    """Minutes and seconds: 2:00."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
