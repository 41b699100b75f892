"""One flag chooses what a command prints; every help fits 80 columns and ends with an example."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from nwor_bench.cli.app import app
from nwor_bench.errors import ExitCode

Run = Callable[..., tuple[int, str, str]]

CONFIG = Path(__file__).parents[1] / "data/configs/Llama-3.2-3B.json"

pytestmark = pytest.mark.usefixtures("own_surroundings")


def commands(node: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command by its path, with its flags."""
    for name, each in getattr(node, "commands", {}).items():
        yield from commands(each, f"{path} {name}".strip())
    if not hasattr(node, "commands"):
        yield path, {flag for parameter in node.params for flag in parameter.opts}


def test_every_command_has_both_flags() -> None:
    found = dict(commands(typer.main.get_command(app)))
    assert {"--json", "--quiet"} <= set.intersection(*found.values())


@pytest.mark.parametrize(
    "command",
    [
        f"plan --config {CONFIG}",
        f"supports {CONFIG}",
        "pairs list",
    ],
)
def test_quiet_changes_nothing_beside_json(command_line: Run, command: str) -> None:
    told = command_line(*command.split(), "--json")
    assert (told[0], bool(json.loads(told[1]))) == (ExitCode.OK, True)
    assert command_line(*command.split(), "-q", "--json") == told


@pytest.mark.parametrize(
    ("arguments", "first", "second"),
    [
        ("compare no-run no-run --json --markdown", "--json", "--markdown"),
        ("compare no-run no-run --markdown -q", "--markdown", "--quiet"),
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


COMMANDS = (
    "sweep", "report", "compare", "plan", "supports", "doctor", "kernels", "live", "profile ncu",
    "profile nsys", "pairs list", "pairs fetch", "scenarios list",
)  # fmt: skip

GROUPS = ("", "pairs", "scenarios", "profile")


@pytest.mark.parametrize("command", [*GROUPS, *COMMANDS])
def test_a_help_fits_and_ends_with_an_example(command_line: Run, command: str) -> None:
    code, out, _ = command_line(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "<bool>" not in out
    assert "…" not in out
    last = out.rstrip().splitlines()[-1].strip()
    assert command in GROUPS or last.startswith(f"nwor-bench {command}")
