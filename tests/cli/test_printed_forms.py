"""One flag chooses what a command prints: --json, --markdown, --quiet or --verbose."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from nwor_bench.cli.app import app
from nwor_bench.errors import ExitCode

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("own_surroundings")

ARGUMENTS = {
    "sweep": "",
    "report": "no-run",
    "compare": "no-run no-run",
    "plan": "--config none.json",
    "supports": "none.json",
    "doctor": "",
    "kernels": "",
    "live": "http://localhost:1",
    "profile ncu": "--read none",
    "profile nsys": "--read none",
    "pairs list": "",
    "pairs show": "tiny",
    "pairs fetch": "tiny",
    "pairs train": "tiny-eagle",
    "scenarios list": "",
    "scenarios show": "short",
}


def commands(node: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command by its path, with its flags."""
    for name, each in getattr(node, "commands", {}).items():
        yield from commands(each, f"{path} {name}".strip())
    if not hasattr(node, "commands"):
        yield path, {flag for parameter in node.params for flag in parameter.opts}


def test_every_command_has_both_flags_and_is_tried_here() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert found.keys() == ARGUMENTS.keys()
    assert {"--json", "--quiet"} <= set.intersection(*found.values())


@pytest.mark.parametrize("command", ARGUMENTS)
def test_json_and_quiet_are_one_too_many(command_line: Run, command: str) -> None:
    given = command_line(*command.split(), *ARGUMENTS[command].split(), "-q", "--json")
    value = "'-'" if command == "compare" else "True"
    message = (
        f"nwor-bench: --json: {value} is not usable; --quiet chooses what is printed too; give one "
        "of the two\n"
    )
    assert given == (ExitCode.BAD_USAGE, "", message)


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        ("plan --config none.json --json --markdown", "--json", "--markdown"),
        ("plan --config none.json -q --markdown", "--markdown", "--quiet"),
        ("supports --recipes -q --markdown", "--markdown", "--quiet"),
        ("compare no-run no-run --json - --markdown -", "--json", "--markdown"),
        ("compare no-run no-run --markdown=- -q", "--markdown", "--quiet"),
        ("sweep --json -v", "--json", "--verbose"),
        ("report no-run -q -v", "--quiet", "--verbose"),
    ],
)
def test_other_forms_beside_each_other(
    command_line: Run, arguments: str, first: str, second: str
) -> None:
    code, out, err = command_line(*arguments.split())
    assert (code, out) == (ExitCode.BAD_USAGE, "")
    assert err.startswith(f"nwor-bench: {first}: ")
    assert second in err


@pytest.mark.parametrize("flags", ["--json x.json -q", "--json - -q --html x.html", "-q"])
def test_a_file_is_not_printed(command_line: Run, flags: str) -> None:
    err = command_line("compare", "no-run", "no-run", *flags.split())[2]
    assert ("--quiet" in err) is flags.startswith("--json -")
