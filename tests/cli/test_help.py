"""Every help fits 80 columns, shows no type of flags, and ends with an example."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nwor_bench.cli import command

Run = Callable[..., tuple[int, str, str]]

COMMANDS = (
    "sweep", "report", "compare", "plan", "supports", "doctor", "kernels", "live", "profile ncu",
    "profile nsys", "pairs list", "pairs show", "pairs fetch", "scenarios list",
    "scenarios show",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("own_surroundings")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_fits_and_ends_with_an_example(command_line: Run, command: str) -> None:
    code, out, _ = command_line(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "<bool>" not in out
    assert "…" not in out
    last = out.rstrip().splitlines()[-1].strip()
    assert last.startswith(f"nwor-bench {command}")


@pytest.mark.parametrize("group", ["", "pairs", "scenarios", "profile"])
def test_the_help_of_a_group(command_line: Run, group: str) -> None:
    _, out, _ = command_line(*group.split(), "--help")
    assert "<bool>" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_shell_completes_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("runs/first", "runs/second", "runs/no-run", "elsewhere/third"):
        (tmp_path / folder).mkdir(parents=True)
        if folder != "runs/no-run":
            (tmp_path / folder / "run.json").touch()
    monkeypatch.chdir(tmp_path)
    assert command.complete_runs("") == ["runs/first", "runs/second"]
    assert command.complete_runs("runs/s") == ["runs/second"]
    assert command.complete_runs("elsewhere/") == ["elsewhere/third"]
    assert "short" in command.complete_scenarios("s")
    assert "smollm2" in command.complete_pairs("smol")
    assert "tiny" not in command.complete_pairs("smol")
    assert "quick" in command.complete_sweeps("q")
