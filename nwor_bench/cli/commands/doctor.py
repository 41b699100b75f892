"""`nwor-bench doctor`: what this machine can measure, with a remedy for what it cannot."""

from typing import Annotated

import typer

from nwor_bench.errors import ExitCode


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Start no engine; skips the check of the hooks.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer.")] = False,
) -> None:
    """Check what this machine can measure: vLLM, hooks, GPU, profilers, memory.

    Starts a tiny engine to attach and detach the hooks (5 to 20 s; the first engine
    on a machine with a GPU takes minutes).

    Exit codes: 0 a sweep can run, 2 it cannot.
    """
    import json
    from dataclasses import asdict

    from nwor_bench import __version__
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    from nwor_bench.cli.doctor import can_sweep, check_lines, verdict, wrap
    from nwor_bench.cli.doctor.checks import examine
    from nwor_bench.cli.doctor.hooks import check_hooks

    if not no_engine and not quiet:
        typer.echo("starting a tiny engine to try the hooks ...", err=True)
    checks = examine(None if no_engine else check_hooks)
    ready = can_sweep(checks)
    if as_json:
        facts = {"nwor_bench": __version__, "can_sweep": ready}
        typer.echo(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for line in wrap(verdict(checks)) if quiet else check_lines(checks):
            typer.echo(line)
    if not ready:
        raise typer.Exit(ExitCode.BAD_USAGE)
