"""`nwor-bench profile nsys` around a tool that behaves as Nsight Systems was seen to."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.errors import ExitCode

SWEEP = ["sweep", "--pair", "tiny"]

TOOL = """#!/bin/sh
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0"; exit 0;;
esac
while [ "$1" != --output ]; do shift; done
{profile}
"""
"""`$2` is then what follows --output."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def install(folder: Path, profile: str) -> None:
    tool = folder / "bin" / "nsys"
    tool.write_text(TOOL.format(profile=profile))
    tool.chmod(0o755)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", "nsys", *arguments])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "here").iterdir())


def test_the_report_is_named_with_the_command_that_reads_it(folder: Path) -> None:
    install(folder, 'echo report > "$2.nsys-rep"')
    result = invoke("--report", "new/a.v1", "--", *SWEEP)
    assert result.exit_code == 0, result.exception
    assert [path.name for path in (folder / "here/new").iterdir()] == ["a.v1.nsys-rep"]
    assert "nsys stats --report nvtx_gpu_proj_sum new/a.v1.nsys-rep" in result.output


def test_a_sweep_that_fails_after_its_report_keeps_it(folder: Path) -> None:
    """3: correctness broken. The windows that led there are worth reading."""
    install(folder, 'echo report > "$2.nsys-rep"; exit 3')
    result = invoke("-q", "--", *SWEEP)
    assert result.exit_code == 3
    assert result.stdout == "nwor-nsys.nsys-rep\n"
    assert names(folder) == ["nwor-nsys.nsys-rep"]


@pytest.mark.parametrize(
    ("profile", "naming"),
    [
        ("true", "nothing was captured"),
        ("exit 9", "exit code 9"),
    ],
)
def test_no_report_is_one_message(folder: Path, profile: str, naming: str) -> None:
    """Nsight Systems ends with 0 although it captured or imported nothing."""
    install(folder, profile)
    result = invoke("--", *SWEEP)
    with refused("profile nsys", naming=naming):
        raise result.exception
    assert result.exception.exit_code == 2
    assert names(folder) == []


def test_an_earlier_report_is_not_taken_for_this_runs(folder: Path) -> None:
    install(folder, 'echo report > "$2.nsys-rep"')
    assert invoke("--", *SWEEP).exit_code == 0
    install(folder, "true")
    result = invoke("--", *SWEEP)
    assert "nothing was captured" in str(result.exception)
    assert names(folder) == []


SLOW = (
    "trap stop=1 INT; touch began; "
    'while [ -z "$stop" ]; do sleep 0.1; done; sleep 0.6; {report}; exit 130'
)
"""What is interrupted, and takes longer over its report than `subprocess.run` gives it."""


@pytest.mark.slow  # processes
@pytest.mark.parametrize("report", ['echo report > "$2.nsys-rep"', "touch ended"])
def test_ctrl_c_waits_for_the_report(folder: Path, report: str) -> None:
    """A terminal's Ctrl-C reaches the tool, its sweep and this command at once."""
    install(folder, SLOW.format(report=report))
    code, told = ended_by(folder, lambda pid: os.killpg(pid, signal.SIGINT))
    assert code == ExitCode.INTERRUPTED
    if report == "touch ended":
        assert told.splitlines()[-1] == "nwor-bench: interrupted"
        assert names(folder) == ["began", "ended"]
    else:
        assert names(folder) == ["began", "nwor-nsys.nsys-rep"]


@pytest.mark.slow  # processes
def test_sigterm_is_handed_on_to_the_tool(folder: Path) -> None:
    """A CI runner's stop reaches only this command; the tool would run on to its end."""
    install(folder, SLOW.format(report="touch ended"))
    code, _ = ended_by(folder, lambda pid: os.kill(pid, signal.SIGTERM))
    assert code == ExitCode.INTERRUPTED
    assert names(folder) == ["began", "ended"]


def ended_by(folder: Path, end: Callable[[int], None]) -> tuple[int, str]:
    """The command in a process of its own, ended when the tool has begun: exit code, stderr."""
    checkout = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", "from nwor_bench.cli.app import main; main()",
         *("profile", "nsys", "--", *SWEEP)],
        env={**os.environ, "PYTHONPATH": str(checkout)}, stderr=subprocess.PIPE, text=True,
        stdout=subprocess.DEVNULL, start_new_session=True, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (folder / "here" / "began").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    end(process.pid)
    told = process.communicate(timeout=60)[1]
    return process.returncode, told


def heed_ctrl_c() -> None:
    """A shell has its background jobs, and so their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
