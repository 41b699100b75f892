"""--json and --quiet of the commands beside sweep, report, compare and plan."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented_keys import lacking, top_level
from fake_bench import FACTS, make_bench
from rich.console import Console

from nwor_bench.errors import ExitCode
from nwor_bench.microbench.bench import run_kernels
from nwor_bench.microbench.cases import Spec, Window
from nwor_bench.models.pairs import pair_names

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("own_surroundings")


def check_keys(out: str, section: str, *, whole: bool = True) -> Any:
    """The document, which must have the keys that docs/json.md lists under that heading."""
    told = json.loads(out)
    assert lacking(told, section) == []
    if whole:
        assert set(told) == top_level(section)
    return told


def test_pairs(command_line: Run) -> None:
    code, out, err = command_line("pairs", "list", "--json")
    assert (code, err) == (0, "")
    told = check_keys(out, "pairs list")
    assert [pair["name"] for pair in told["pairs"]] == list(pair_names())
    assert command_line("pairs", "list", "-q")[1].split() == list(pair_names())

    code, out, err = command_line("pairs", "fetch", "tiny", "--json")
    assert (code, err) == (0, "")
    told = check_keys(out, "pairs fetch")
    assert Path(told["target"], "config.json").is_file()
    quiet = command_line("pairs", "fetch", "tiny", "-q")[1]
    assert quiet.splitlines() == [f"target: {told['target']}", f"drafter: {told['drafter']}"]


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("plan-states.json", "plan"), ("scenarios.json", "scenarios list"),
        ("supports-states.json", "supports"), ("supports-quiet.txt", "supports"),
    ],
)  # fmt: skip
def test_golden_pages_have_the_documented_keys(page: str, section: str) -> None:
    check_keys((Path(__file__).parents[1] / "golden/predicted" / page).read_text(), section)


def test_kernels(command_line: Run, capsys: pytest.CaptureFixture[str]) -> None:
    spec = Spec(kernels=("commit",), windows=(Window(8, 4),), max_rounds=3)

    def session(folder: str, **shown: bool) -> str:
        capsys.readouterr()
        bench = make_bench(spec), FACTS
        console = Console(width=80)
        code = run_kernels(console, spec, Path(folder), make_bench=lambda _: bench, **shown)
        assert code == ExitCode.OK
        return capsys.readouterr().out

    told = check_keys(session("a", as_json=True), "kernels", whole=False)
    assert told["folder"] == "a"
    kept = json.loads(Path("a/kernels.json").read_text())
    assert {name: told[name] for name in kept} == kept
    quiet, every = session("b", quiet=True), session("c")
    assert len(quiet.splitlines()) < len(every.splitlines())
    assert quiet.splitlines()[-1].startswith("Files: b/kernels.csv")


def test_profile(command_line: Run) -> None:
    for tool in ("ncu", "nsys"):
        out = command_line("profile", tool, "--dry-run", "--json", "--", "sweep")[1]
        told = check_keys(out, "profile --dry-run")
        plain = command_line("profile", tool, "--dry-run", "--", "sweep")[1]
        assert plain.strip() == told["command"]


@pytest.mark.parametrize(("name", "flag"), [("ncu", "--export"), ("nsys", "--output")])
def test_profile_names_its_report(
    name: str, flag: str, command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / name
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 2025.3.1 && exit\n'
        f'while [ "$1" != {flag} ]; do shift; done; echo report > "$2.{name}-rep"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    told = check_keys(command_line("profile", name, "--json", "--", "sweep")[1], f"profile {name}")
    assert Path(told["report"]).read_text() == "report\n"
    quiet = command_line("profile", name, "-q", "--", "sweep")[1]
    assert quiet == f"{told['report']}\n"


@pytest.mark.slow
def test_doctor_is_quiet(command_line: Run) -> None:
    every = command_line("doctor", "--no-engine")[1]
    quiet = command_line("doctor", "--no-engine", "-q")[1]
    assert every.startswith(f"{quiet}\n")
    assert quiet.startswith("A sweep can")
