"""What a sweep prints on stdout: all of it, the answer and the folder, or one JSON document."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from nwor_bench.instruments.versions import require_supported_vllm, unknown_version
from nwor_bench.records.json_text import result_document
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult
from nwor_bench.report.files import run_result
from nwor_bench.report.run_report import summary
from nwor_bench.report.terminal import print_document, print_path
from nwor_bench.run.run_options import RunOptions


def tell_json(content: Mapping[str, Any]) -> None:
    """Print one JSON document, headed by its version and ours."""
    sys.stdout.write(result_document(content))


def console_for(options: RunOptions) -> Console:
    """The console for progress and steps, which --quiet and --json leave out."""
    return Console(quiet=options.quiet or options.as_json)


def check_vllm_version(console: Console) -> None:
    """Tell what a vLLM with which we were not tried changed. Raises UnsupportedVllmError."""
    require_supported_vllm()
    untried = unknown_version()
    if untried is not None:
        console.print(untried, style="yellow", highlight=False, markup=False)


def tell_result(
    console: Console,
    options: RunOptions,
    run: RunData,
    cells: Sequence[CellResult],
    folder: Path,
    *,
    in_sweep: bool,
) -> None:
    """Print a run's result; the runs of a sweep are in the sweep's own JSON."""
    if options.as_json:
        if not in_sweep:
            tell_json(run_result(run, cells, folder))
        return
    shown = Console() if options.quiet else console
    document = summary(run, cells, verbose=options.verbose)
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
