"""A run's output: progress, plan, and the result as text or JSON."""

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.instruments.versions import require_supported_vllm, untried_version
from nwor_bench.records.files import result_document
from nwor_bench.records.types import INTERLEAVED_PHASES, BatchRecord, Cell, Phase
from nwor_bench.report.files import run_result
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.run.heartbeat import Heartbeat
from nwor_bench.run.run_options import RunOptions


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


class Progress:
    """A line for each step and batch; on a terminal the batches share one line, updated in place.

    Args:
        console: where it prints.
        num_batches: the most that may run.
        heartbeat: shows that a step goes on if no terminal does.
    """

    def __init__(self, console: Console, num_batches: int, heartbeat: Heartbeat | None = None):
        self._console = console
        self._num_batches = num_batches
        self._heartbeat = heartbeat
        self._done = 0
        self._began = time.monotonic()
        self._doing = ""
        self._status = console.status(self)

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    def __rich__(self) -> Text:
        """The line that a terminal shows beside the spinner, drawn several times a second."""
        elapsed = timedelta(seconds=round(time.monotonic() - self._began))
        return Text(f"{elapsed} {self._doing}", overflow="ellipsis", no_wrap=True)

    def doing(self, what: str) -> None:
        """Show what is being done, for as long as nothing else is."""
        self._doing = what
        if self._heartbeat is not None:
            self._heartbeat.note(what)

    def say(self, line: str) -> None:
        """Print a step that happens once: start-up, the gate's outcome."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self._heartbeat is not None:
            self._heartbeat.note()

    def batch_done(self, cell: Cell, record: BatchRecord) -> None:
        """Show a batch's numbers."""
        self._done += 1
        self._num_batches = max(self._num_batches, self._done)  # probed batches were not foreseen
        phase = Phase.GATE if record.phase == Phase.INTERLEAVED_GATE else record.phase
        is_block = phase in (Phase.TIMED, Phase.INTERLEAVED)
        line = (
            f"[{self._done:{len(str(self._num_batches))}}/{self._num_batches}] "
            f"{f'block {record.block}' if is_block else phase:8} "
            f"{'interleaved' if record.phase in INTERLEAVED_PHASES else cell.label:16} "
            f"{record.latency_ms / 1e3:6.2f} s  {record.tokens_per_s:6.0f} tokens/s  "
            f"accepted {record.accepted_tokens}/{record.draft_tokens}"
            + (f"  parity {record.parity}" if record.parity else "")
        )
        if self._console.is_terminal:
            self._doing = line
        else:
            self.say(line)
