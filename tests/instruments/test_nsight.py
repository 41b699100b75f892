"""`nwor-bench profile`: command lines, reports, and tools that fail as Nsight's were seen to."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
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
from nwor_bench.errors import ExitCode
from nwor_bench.instruments import nsight
from nwor_bench.instruments.nsight import METRICS, NCU, NSYS, numbers_regex

SWEEP = ["sweep", "--pair", "tiny", "--engine-args", '{"enforce_eager": true}']
TOOLS = pytest.mark.parametrize("tool", ["ncu", "nsys"])

TOOL = """#!/bin/sh
if [ "$1" = --version ]; then echo "NVIDIA Nsight, version 2025.3.1.0-234433681190v0"; exit 0; fi
while [ "$1" != --output ] && [ "$1" != --export ]; do shift; done
{profile}
"""
"""`$2` is then what follows --output or --export."""


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", *arguments])


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder; `install` puts tools beside it."""
    for name in ("bin", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.setattr(nsight, "EXTRA_PLACE", "/nowhere")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def install(here: Path, tool: str, profile: str | bytes) -> None:
    path = here.parent / "bin" / tool
    path.write_bytes(
        profile if isinstance(profile, bytes) else TOOL.format(profile=profile).encode()
    )
    path.chmod(0o755)


def names(here: Path) -> list[str]:
    return sorted(path.name for path in here.iterdir())


def matched(pattern: str, up_to: int) -> list[int]:
    """Numbers whose whole text an expression matches, as ncu was seen to take them."""
    return [number for number in range(up_to) if re.fullmatch(pattern, str(number))]


def test_dry_runs_print_what_would_run() -> None:
    result = invoke("ncu", "--dry-run", "--windows", "20", "--skip", "7", "--", *SWEEP)
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
    words = shlex.split(invoke("nsys", "--dry-run", "--capture", "batch", "--", *SWEEP).stdout)
    assert words[:2] == ["nsys", "profile"]
    assert words[-len(SWEEP) :] == SWEEP
    assert "batch@nwor-bench" in words


@TOOLS
def test_a_reports_ending_may_be_written(tool: str) -> None:
    plain = invoke(tool, "--dry-run", "--report", "a.b", "--", *SWEEP).stdout
    assert plain == invoke(tool, "--dry-run", "--report", f"a.b.{tool}-rep", "--", *SWEEP).stdout
    assert " a.b " in plain


def test_ncu_has_an_eager_engine() -> None:
    plain = invoke("ncu", "--dry-run", "--", "sweep", "--pair", "tiny").stdout
    assert plain == invoke("ncu", "--dry-run", "--", *SWEEP).stdout
    assert "enforce_eager" in plain
    with refused("profile", value="--engine-args", naming="--counters dram"):
        raise invoke("ncu", "--", "sweep", "--engine-args", "{}").exception


@given(first=st.integers(1, 3_000), count=st.integers(1, 400))
@examples(100)
def test_a_range_filter_takes_its_windows_and_no_other(first: int, count: int) -> None:
    pattern = numbers_regex(first, first + count - 1)
    assert set(pattern) <= set("0123456789[-]|")  # what ncu's help shows, and no more
    assert not set("-") & set(re.sub(r"\[\d-\d\]", "", pattern))  # only between two digits
    assert matched(pattern, 2 * (first + count) + 100) == list(range(first, first + count))
    assert len(numbers_regex(first, 98_765)) < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ncu", "--dry-run", "--"], "-- sweep"),
        (["ncu", "--dry-run", "--", "sweep", "--output=x"], "--output"),
        (["nsys", "--dry-run", "--", "sweep", "--resume", "x"], "--resume"),
        (["nsys", "--dry-run", "--", "sweep", "--file=x"], "--file"),
        (["nsys", "--dry-run", "--", "report", "x"], "-- sweep"),
        (["ncu", "--dry-run", "--windows", "0", "--", "sweep"], "--windows"),
        (["nsys", "--dry-run", "--capture", "window", "--", "sweep"], "--capture"),
        (["ncu", "--", *SWEEP], "is not installed"),
        (["nsys", "--", *SWEEP], "is not installed"),
    ],
)
def test_what_cannot_run_is_refused(
    arguments: list[str], message: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(here))
    error = invoke(*arguments).exception
    assert error.exit_code == ExitCode.BAD_USAGE
    assert message in str(error)
    assert names(here) == []


@pytest.mark.parametrize("tool", [NCU, NSYS])
@pytest.mark.parametrize(
    "text", [b"#!/bin/sh\nprintf '\\377\\376'\n", b"\x7fELF and no more"],
    ids=["no text", "no program"],
)  # fmt: skip
def test_a_tool_that_is_none_is_one_message(tool: nsight.Profiler, text: bytes, here: Path) -> None:
    install(here, tool.name, text)
    with refused(here.parent / "bin" / tool.name, nsight.ToolUnavailable, naming=tool.product):
        raise invoke(tool.name, "--", *SWEEP).exception


@TOOLS
@pytest.mark.parametrize(
    ("report", "cause"),
    [*((name, None) for name in ("", "/", "..")),
     ("file/x", FileExistsError), ("taken", IsADirectoryError)],
)  # fmt: skip
def test_a_report_that_has_no_place_is_refused_before_anything_runs(
    tool: str, report: str, cause: type[OSError] | None, here: Path
) -> None:
    (here / "file").touch()
    (here / f"taken.{tool}-rep").mkdir()
    install(here, tool, f"touch {here}/ran")
    with refused("--report", value=str(Path(report)), cause=cause):
        raise invoke(tool, "--report", report, "--", *SWEEP).exception
    assert not (here / "ran").exists()


@pytest.mark.parametrize(
    ("tool", "reads"),
    [
        ("ncu", "ncu --page raw --csv --print-units base --import new/a.v1.ncu-rep"),
        ("nsys", "nsys stats --report nvtx_gpu_proj_sum new/a.v1.nsys-rep"),
    ],
)
def test_the_report_is_named_with_the_command_that_reads_it(
    tool: str, reads: str, here: Path
) -> None:
    install(here, tool, f'echo report > "$2.{tool}-rep"')
    result = invoke(tool, "--report", "new/a.v1", "--", *SWEEP)
    assert result.exit_code == 0, result.exception
    assert names(here / "new") == [f"a.v1.{tool}-rep"]
    assert result.stdout == f"Report: new/a.v1.{tool}-rep (to read it: {reads})\n"


def test_a_sweep_that_fails_after_its_report_keeps_it(here: Path) -> None:
    """3: correctness broken. The windows that led there are worth reading."""
    install(here, "nsys", 'echo report > "$2.nsys-rep"; exit 3')
    result = invoke("nsys", "-q", "--", *SWEEP)
    assert result.exit_code == 3
    assert result.stdout == "nwor-nsys.nsys-rep\n"
    assert names(here) == ["nwor-nsys.nsys-rep"]


@pytest.mark.parametrize(
    ("tool", "profile", "naming"),
    [
        ("nsys", "true", "nothing was captured"),  # it ends with 0 although it captured nothing
        ("nsys", "exit 9", "exit code 9"),
        ("ncu", "exit 9", "exit code 9"),
        ("ncu", "exit 9", "NVreg_RestrictProfilingToAdminUsers=0"),
    ],
)
def test_no_report_is_one_message_and_an_earlier_report_is_not_taken_for_it(
    tool: str, profile: str, naming: str, here: Path
) -> None:
    (here / f"nwor-{tool}.{tool}-rep").touch()
    install(here, tool, profile)
    with refused(f"profile {tool}", naming=naming) as refusal:
        raise invoke(tool, "--", *SWEEP).exception
    assert refusal.value.exit_code == 2
    assert names(here) == []


SLOW = (
    "trap stop=1 INT; touch began; "
    'while [ -z "$stop" ]; do sleep 0.1; done; sleep 0.6; {report}; exit 130'
)
"""What is interrupted, and takes longer over its report than `subprocess.run` gives it."""


@pytest.mark.slow  # processes
@pytest.mark.parametrize(
    ("send", "number", "report", "left"),
    [
        # A terminal's Ctrl-C reaches the tool, its sweep and this command at once.
        (os.killpg, signal.SIGINT, 'echo report > "$2.nsys-rep"', "nwor-nsys.nsys-rep"),
        (os.killpg, signal.SIGINT, "touch ended", "ended"),
        # A CI runner's stop reaches only this command; the tool would run on to its end.
        (os.kill, signal.SIGTERM, "touch ended", "ended"),
    ],
    ids=["Ctrl-C and a report", "Ctrl-C", "SIGTERM"],
)
def test_a_signal_ends_the_tool_and_waits_for_its_report(
    send: Any, number: int, report: str, left: str, here: Path
) -> None:
    install(here, "nsys", SLOW.format(report=report))
    process = subprocess.Popen(
        [sys.executable, "-c", "from nwor_bench.cli.app import main; main()",
         *("profile", "nsys", "--", *SWEEP)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True, start_new_session=True,
        # A shell has its background jobs, and so their children, ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (here / "began").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    send(process.pid, number)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == ExitCode.INTERRUPTED
    assert names(here) == ["began", left]
    if (number, left) == (signal.SIGINT, "ended"):
        assert told.splitlines()[-1] == "nwor-bench: interrupted"
