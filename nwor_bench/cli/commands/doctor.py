"""`nwor-bench doctor`: what this machine can measure, and what to do about the rest."""

from typing import Annotated

import typer

from nwor_bench.errors import ExitCode


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    no_engine: Annotated[
        bool, typer.Option("--no-engine", help="Start no engine: the hooks are not tried.")
    ] = False,
) -> None:
    """Check what this machine can measure: vLLM, hooks, GPU, profilers, memory.

    Starts a tiny engine to attach the hooks and take them off again (5 to 20 s;
    the first one on a machine with a GPU takes minutes).

    Exit codes: 0 a sweep can run, 2 it cannot.
    """
    import json
    from dataclasses import asdict

    from nwor_bench import __version__
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    from nwor_bench.cli.doctor import can_sweep, examine
    from nwor_bench.cli.doctor.hooks import check_hooks
    from nwor_bench.cli.doctor.text import check_lines

    if not no_engine:
        typer.echo("starting a tiny engine to try the hooks ...", err=True)
    checks = examine(None if no_engine else check_hooks)
    ready = can_sweep(checks)
    if as_json:
        facts = {"nwor_bench": __version__, "can_sweep": ready}
        typer.echo(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for line in check_lines(checks):
            typer.echo(line)
    if not ready:
        raise typer.Exit(ExitCode.BAD_USAGE)
