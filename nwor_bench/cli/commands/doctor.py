"""`nwor-bench doctor`: what this machine can measure, with a remedy for what it cannot."""

from collections.abc import Sequence
from functools import partial
from textwrap import wrap as wrap_text
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.errors import ExitCode

if TYPE_CHECKING:
    from nwor_bench.cli.doctor_checks import Check

WIDTH = 80
INDENT = 19

_wrap = partial(wrap_text, width=WIDTH, break_on_hyphens=False)
"""Wrapped lines. Hyphens do not break, so that paths, options and packages can be copied."""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Start no engine; skips the check of the hooks.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False,
) -> None:
    """Check what this machine can measure: vLLM, hooks, GPU, profilers, memory.

    Starts a tiny engine to try the hooks (5 to 20 s; the first on a GPU: minutes).

    Exit codes: 0 a sweep can run, 2 it cannot.
    """
    import json
    from dataclasses import asdict

    from nwor_bench import __version__
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    from nwor_bench.cli.doctor_checks import can_sweep, examine
    from nwor_bench.cli.doctor_hooks import check_hooks

    if not no_engine and not quiet:
        typer.echo("starting a tiny engine to try the hooks ...", err=True)
    checks = examine(None if no_engine else check_hooks)
    ready = can_sweep(checks)
    if as_json:
        facts = {"nwor_bench": __version__, "can_sweep": ready}
        typer.echo(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for line in _wrap(verdict(checks)) if quiet else check_lines(checks):
            typer.echo(line)
    if not ready:
        raise typer.Exit(ExitCode.BAD_USAGE)


def check_lines(checks: "Sequence[Check]") -> list[str]:
    """One line per check, `name  state  what was found`, followed by its remedy."""
    lines = []
    for check in checks:
        head = f"{check.name:9} {check.state:8} "
        lines += _wrap(check.found, initial_indent=head, subsequent_indent=" " * INDENT) or [head]
        if check.remedy:
            arrow = " " * INDENT + "-> "
            lines += _wrap(check.remedy, initial_indent=arrow, subsequent_indent=" " * len(arrow))
    return [*lines, "", *_wrap(verdict(checks))]


def verdict(checks: "Sequence[Check]") -> str:
    """One sentence: whether a sweep can run, and which checks failed."""
    from nwor_bench.cli.doctor_checks import State, can_sweep

    failed = [check.name for check in checks if check.state is not State.OK]
    if not can_sweep(checks):
        stops = [check.name for check in checks if check.needed and check.name in failed]
        return f"A sweep cannot run here until these are fixed: {', '.join(stops)}."
    if not failed:
        return "A sweep can run here, and everything that nwor-bench measures can be measured."
    return f"A sweep can run here. Missing or wrong, but not needed for it: {', '.join(failed)}."
