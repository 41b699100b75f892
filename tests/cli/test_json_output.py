"""--json and --quiet: nothing else on stdout, and every key that docs/json.md lists."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documented_keys import documented, lacking, top_level
from fake_engine import FakeEngine

from nwor_bench.errors import ExitCode
from nwor_bench.models.pairs import pair_names

pytestmark = pytest.mark.usefixtures("own_surroundings")


Run = Callable[..., tuple[int, str, str]]


def check_keys(out: str, section: str) -> Any:
    """The document, which must have the keys that docs/json.md lists under that heading."""
    told = json.loads(out)
    assert lacking(told, section) == []
    assert set(told) == top_level(section)
    return told


def test_pairs(command_line: Run) -> None:
    code, out, err = command_line("list", "pairs", "--json")
    assert (code, err) == (0, "")
    told = check_keys(out, "list pairs")
    assert [pair["name"] for pair in told["pairs"]] == list(pair_names())
    assert command_line("list", "pairs", "-q")[1].split() == list(pair_names())

    code, out, err = command_line("list", "--fetch", "tiny", "--json")
    assert (code, err) == (0, "")
    told = check_keys(out, "list --fetch")
    assert Path(told["target"], "config.json").is_file()
    quiet = command_line("list", "--fetch", "tiny", "-q")[1]
    assert quiet.splitlines() == [f"target: {told['target']}", f"drafter: {told['drafter']}"]


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("printed/slower.json", "compare"), ("predicted/plan-states.json", "plan"),
        ("predicted/scenarios.json", "list scenarios"),
    ],
)  # fmt: skip
def test_golden_pages_have_the_documented_keys(page: str, section: str) -> None:
    text = (Path(__file__).parents[1] / "golden" / page).read_text()
    check_keys(text.partition("\nexit code ")[0], section)


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


CHECKOUT = Path(__file__).resolve().parents[2]

CONFIG = CHECKOUT / "tests/data/configs/Llama-3.2-3B.json"

TINY = ("sweep", "--pair", "tiny", "--requests", "2", "--batches", "2", "--max-new-tokens", "6")

SWEEP = """
name = "two"
[axes]
pairs = ["tiny"]
scenarios = ["short"]
requests = [1, 2]
[settings]
batches = 1
max_new_tokens = 6
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
def test_a_sweep_and_its_report_print_one_document(command_line: Run) -> None:
    code, out, err = command_line(*TINY, "--output", "run", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert lacking(told, "sweep, report") == []
    assert set(told) == top_level("sweep, report")
    assert told["folder"] == "run"
    assert told["status"] == "complete"
    assert told["cells"][0]["cell"] == "off x off"
    assert command_line("report", "run", "--json") == (0, out, "")


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
def test_an_interrupted_run_prints_its_document(command_line: Run, engine: FakeEngine) -> None:
    engine.failing[9] = KeyboardInterrupt()
    code, out, _ = command_line(*TINY, "--output", "run", "--json")
    assert code == ExitCode.INTERRUPTED
    assert json.loads(out)["status"] == "partial"


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
def test_quiet_prints_the_answer_and_the_folder(command_line: Run) -> None:
    code, out, err = command_line(*TINY, "--output", "run", "-q")
    assert (code, err) == (0, "")
    *answer, folder = out.splitlines()
    assert folder == "Report: run/report.html"
    assert " ".join(answer).startswith("CPU RUN: ")
    assert command_line("report", "run", "--quiet") == (0, out, "")


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
def test_a_sweep_of_runs(command_line: Run, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(SWEEP)
    code, out, err = command_line("sweep", "--file", "two.toml", "--output", "many", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert lacking(told, "sweep --file, report of a sweep folder") == []
    assert set(told) == top_level("sweep --file, report of a sweep folder")
    assert [run["result"]["status"] for run in told["runs"]] == ["complete"] * 2
    assert command_line("report", "many", "--json") == (0, out, "")
    code, out, _ = command_line("sweep", "--file", "two.toml", "--output", "again", "-q")
    assert out.splitlines()[-1] == "Report: again/summary.html"
    assert out.count("/report.html") == 2
    assert "gate" not in out


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
@pytest.mark.parametrize("more", [("--pair", "tiny"), ("--file", "two.toml")])
def test_a_dry_run(command_line: Run, tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "two.toml").write_text(SWEEP)
    code, out, err = command_line("sweep", *more, "--dry-run", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert set(told) == set(documented()["sweep --dry-run"])
    assert command_line("sweep", *more, "--dry-run", "-q")[1].splitlines()[0] == told["plan"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("own_surroundings", "engine")
def test_the_ratio_of_a_sweep_is_that_of_interleaved_windows(command_line: Run) -> None:
    flags = ("--batches", "24", "--interleave", "windows", "--output", "run", "--json")
    code, out, _ = command_line(*TINY, *flags)
    assert code == 0
    told = json.loads(out)
    assert told["violations"] == []
    cells = {cell["cell"]: cell for cell in told["cells"]}
    for name in ("off x off (A/A)", "stage x off", "stage x graph"):
        cell = cells[name]
        assert (cell["interleaved"], cell["compared"]) == ("windows", "wall_ms")
        assert cell["groups"] > 10
        assert cell["ratio_to_off"] == pytest.approx(1, abs=0.01)
        assert cell["ratio_batches"] == 1
        assert cell["verdict"] == "SAME"
    # The made-up engine's control does nothing of its own.
    assert cells["control x off"]["verdict"] == "INEFFECTIVE"
    assert told["split"] == []
    assert command_line("report", "run", "--json") == (0, out, "")
