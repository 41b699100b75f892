"""Every help fits 80 columns, shows no type of flags, and ends with an example."""

from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]

COMMANDS = (
    "sweep", "report", "compare", "plan", "supports", "doctor", "kernels", "live", "profile ncu",
    "profile nsys", "pairs list", "pairs show", "pairs fetch", "scenarios list",
    "scenarios show",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_surroundings")


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
