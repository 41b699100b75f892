"""`nwor-bench doctor`: what this machine can measure, with a remedy for what it cannot."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.workload.options import Option

if TYPE_CHECKING:
    from nwor_bench.cli.doctor_checks import Check
    from nwor_bench.report.document import Document


@dataclass(frozen=True)
class DoctorOptions:
    """What is checked and printed."""

    no_engine: Annotated[bool, Option(
        "Start no engine; skips the check of the hooks.",
    )] = False  # fmt: skip
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags()
def doctor(options: DoctorOptions) -> None:
    """Check what this machine can measure: vLLM, hooks, GPU, profilers, memory.

    Starts a tiny engine to try the hooks (5 to 20 s; the first on a GPU: minutes).

    Exit codes: 0 a sweep can run, 2 it cannot.
    """
    import json

    from nwor_bench import __version__
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    _check_packages()
    from nwor_bench.cli.doctor_checks import can_sweep, examine
    from nwor_bench.cli.doctor_hooks import check_hooks

    if not options.no_engine and not options.quiet:
        typer.echo("starting a tiny engine to try the hooks ...", err=True)
    checks = examine(None if options.no_engine else check_hooks)
    ready = can_sweep(checks)
    if options.as_json:
        facts = {"nwor_bench": __version__, "can_sweep": ready}
        typer.echo(json.dumps({**facts, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        from rich.console import Console

        from nwor_bench.report.terminal import print_document

        print_document(Console(), doctor_document(checks), quiet=options.quiet)
    if not ready:
        raise typer.Exit(ExitCode.BAD_USAGE)


def _check_packages() -> None:
    """Import what a sweep and a report need: other checks, and messages, need some of it too.

    Raises ConfigError with the packages that are missing and the line that installs them.
    """
    from nwor_bench.cli.command import install_command, missing_packages

    missing = missing_packages()
    if missing:
        why = "; ".join(f"{requirement} ({reason})" for requirement, reason in missing.items())
        problem = f"cannot be imported: {why}; write {install_command(missing)}"
        raise ConfigError.at("A sweep cannot run here: packages", problem, joint=" ")


def doctor_document(checks: "Sequence[Check]") -> "Document":
    """Whether a sweep can run, then a row for each check; its remedy is a row below it."""
    from nwor_bench.report.document import Document, Headline, table

    rows = []
    for check in checks:
        rows.append((check.name, str(check.state), check.found))
        if check.remedy:
            rows.append(("", "", f"→ {check.remedy}"))
    found = table(("Check", "State", "Found"), rows, numbers_from=3)
    return Document("What this machine can measure", (Headline("", verdict(checks)), found))


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
