"""`nwor-bench profile`: command lines, missing tools, and reports."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.errors import ConfigError
from nwor_bench.instruments import nsight
from nwor_bench.instruments.nsight import METRICS, NCU, NSYS, numbers_regex

pytestmark = pytest.mark.slow  # whole command lines


SWEEP = ["sweep", "--pair", "tiny", "--engine-args", '{"enforce_eager": true}']


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_ncu_dry_run_prints_what_would_run() -> None:
    result = invoke("profile", "ncu", "--dry-run", "--windows", "20", "--skip", "7", "--", *SWEEP)
    assert result.exit_code == 0
    words = shlex.split(result.stdout)
    assert words[0] == "ncu"
    assert words[-len(SWEEP) :] == SWEEP
    pairs = dict(pairwise(words))
    assert matched(pairs["--range-filter"].removeprefix("::"), 300) == list(range(8, 28))
    assert pairs["--nvtx-include"] == "nwor-bench@window/"
    assert pairs["--cache-control"] == pairs["--clock-control"] == "none"
    assert pairs["--replay-mode"] == "app-range"
    assert pairs["--metrics"].split(",") == list(METRICS)


def matched(pattern: str, up_to: int) -> list[int]:
    """Numbers whose whole text an expression matches, as ncu was seen to take them."""
    return [number for number in range(up_to) if re.fullmatch(pattern, str(number))]


@given(first=st.integers(1, 3_000), count=st.integers(1, 400))
@examples(100)
def test_a_range_filter_takes_its_windows_and_no_other(first: int, count: int) -> None:
    pattern = numbers_regex(first, first + count - 1)
    assert set(pattern) <= set("0123456789[-]|")  # what ncu's help shows, and no more
    assert not set("-") & set(re.sub(r"\[\d-\d\]", "", pattern))  # only between two digits
    assert matched(pattern, 2 * (first + count) + 100) == list(range(first, first + count))


def test_the_filter_of_a_sweep_of_many_windows_stays_short() -> None:
    assert len(numbers_regex(101, 98_765)) < 200


def test_nsys_dry_run_prints_its_command() -> None:
    result = invoke("profile", "nsys", "--dry-run", "--capture", "batch", "--", *SWEEP)
    assert result.exit_code == 0
    profile = shlex.split(result.stdout)
    assert profile[:2] == ["nsys", "profile"]
    assert profile[-len(SWEEP) :] == SWEEP
    assert "batch@nwor-bench" in profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ncu", "--dry-run", "--", "report", "x"], "-- sweep"),
        (["ncu", "--dry-run", "--"], "-- sweep"),
        (["ncu", "--dry-run", "--", "sweep", "--output=x"], "--output"),
        (["nsys", "--dry-run", "--", "sweep", "--resume", "x"], "--resume"),
        (["nsys", "--dry-run", "--", "sweep", "--file=x"], "--file"),
        (["nsys", "--dry-run", "--", "report", "x"], "-- sweep"),
        (["ncu", "--dry-run", "--windows", "0", "--", "sweep"], "--windows"),
        (["nsys", "--dry-run", "--capture", "window", "--", "sweep"], "--capture"),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str) -> None:
    result = invoke("profile", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_missing_tool_is_one_message_and_no_report(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsight, "EXTRA_PLACE", "/nowhere")
    result = invoke("profile", tool, "--", *SWEEP)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert "is not installed" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_tool_that_fails_leaves_no_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(tmp_path / "ncu", 'case "$1" in --version) echo "Version 2025.3.1.0";; *) exit 9;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert isinstance(result.exception, ConfigError)
    assert "exit code 9" in str(result.exception)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["ncu"]


WRITES = (
    'case "$1" in --version) echo "Version 2025.3.1.0";; *) while [ "$1" != --export ]; '
    'do shift; done; echo report > "$2.ncu-rep";; esac'
)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder; `script(here / "../bin" / tool, ...)` installs a tool."""
    for name in ("bin", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_the_report_is_named_with_the_command_that_reads_it(here: Path) -> None:
    script(here / "../bin/ncu", WRITES)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert result.exit_code == 0, result.exception
    assert Path("nwor-ncu.ncu-rep").read_text() == "report\n"
    reads = "ncu --page raw --csv --print-units base --import nwor-ncu.ncu-rep"
    assert result.stdout == f"Report: nwor-ncu.ncu-rep (to read it: {reads})\n"


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
@pytest.mark.parametrize(
    ("report", "cause"),
    [
        *((name, None) for name in ("", "/", "..")),
        ("file/x", FileExistsError),
        ("taken", IsADirectoryError),
    ],
)
def test_a_report_that_has_no_place_is_refused_before_anything_runs(
    tool: str, report: str, cause: type[OSError] | None, here: Path
) -> None:
    (here / "file").touch()
    (here / f"taken.{tool}-rep").mkdir()
    script(here / "../bin" / tool, f'[ "$1" = --version ] && echo 2025.3.1 || touch {here}/ran')
    with refused("--report", value=str(Path(report)), cause=cause):
        raise invoke("profile", tool, "--report", report, "--", *SWEEP).exception
    assert not (here / "ran").exists()


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_reports_ending_may_be_written(tool: str) -> None:
    plain = invoke("profile", tool, "--dry-run", "--report", "a.b", "--", *SWEEP)
    ended = invoke("profile", tool, "--dry-run", "--report", f"a.b.{tool}-rep", "--", *SWEEP)
    assert ended.stdout == plain.stdout
    assert " a.b " in plain.stdout


@pytest.mark.parametrize("tool", [NCU, NSYS])
@pytest.mark.parametrize("text", ["printf '\\377\\376'", None], ids=["no text", "no program"])
def test_a_tool_that_is_none_is_one_message(
    tool: nsight.Profiler, text: str | None, here: Path
) -> None:
    path = script(here / "../bin" / tool.name, text or "")
    if text is None:
        path.write_bytes(b"\x7fELF and no more")
    with refused(path.name, nsight.ToolUnavailable, naming=tool.product):
        raise invoke("profile", tool.name, "--", *SWEEP).exception


def test_ncu_has_an_eager_engine() -> None:
    plain = invoke("profile", "ncu", "--dry-run", "--", "sweep", "--pair", "tiny").stdout
    assert plain == invoke("profile", "ncu", "--dry-run", "--", *SWEEP).stdout
    assert "enforce_eager" in plain
    with refused("profile", value="--engine-args", naming="--counters dram"):
        raise invoke("profile", "ncu", "--", "sweep", "--engine-args", "{}").exception
