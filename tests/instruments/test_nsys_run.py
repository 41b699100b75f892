"""`nwor-bench profile nsys` around a tool that behaves as Nsight Systems was seen to."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nsys_exports import unpacked
from refusals import refused
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.errors import ExitCode
from nwor_bench.instruments.nsight.tools import ToolUnavailable

EXPORT = unpacked("nsys_windows")

SWEEP = ["sweep", "--pair", "tiny"]

TOOL = """#!/bin/sh
echo "$@" >> {log}
case "$1" in
--version) echo "NVIDIA Nsight Systems version 2023.4.4.54-234433681190v0"; exit 0;;
esac
[ "$2" = --help ] && {{ echo "{help}"; exit 0; }}
what=$1
while [ "$1" != --output ]; do shift; done
if [ "$what" = export ]; then [ -s "$3" ] || exit 1; cp {export} "$2"; else {profile}; fi
"""
"""`$2` is then what follows --output."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def install(folder: Path, profile: str, export: Path = EXPORT, help_text: str = "") -> None:
    tool = folder / "bin" / "nsys"
    log = folder / "log"
    tool.write_text(TOOL.format(log=log, help=help_text, export=export, profile=profile))
    tool.chmod(0o755)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", "nsys", *arguments])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "here").iterdir())


def test_a_report_becomes_a_table(folder: Path) -> None:
    install(folder, 'echo report > "$2.nsys-rep"')
    result = invoke("--report", "new/a.v1", "--", *SWEEP)
    assert result.exit_code == 0, result.exception
    assert names(folder) == ["new"]
    written = sorted(path.name for path in (folder / "here/new").iterdir())
    assert written == ["a.v1.nsys-rep", "a.v1.sqlite", "a.v1.windows.csv"]
    assert "Windows by Nsight Systems" in result.output


def test_a_sweep_that_fails_after_its_report_keeps_both(folder: Path) -> None:
    """3: correctness broken. The windows that led there are worth reading."""
    install(folder, 'echo report > "$2.nsys-rep"; exit 3')
    result = invoke("--", *SWEEP)
    assert result.exit_code == 3
    assert "Windows by Nsight Systems" in result.output
    assert names(folder) == ["nwor-nsys.nsys-rep", "nwor-nsys.sqlite", "nwor-nsys.windows.csv"]


@pytest.mark.parametrize(
    ("profile", "naming"),
    [
        ("true", "block@nwor-bench"),
        ("exit 9", "exit code 9"),
    ],
)
def test_no_report_is_one_message_and_no_table(folder: Path, profile: str, naming: str) -> None:
    """Nsight Systems ends with 0 although it captured or imported nothing."""
    install(folder, profile)
    result = invoke("--", *SWEEP)
    with refused("profile nsys", naming=naming):
        raise result.exception
    assert result.exception.exit_code == 2
    assert not [name for name in names(folder) if name.endswith((".csv", ".sqlite"))]


def test_an_earlier_report_is_not_taken_for_this_runs(folder: Path) -> None:
    install(folder, 'echo report > "$2.nsys-rep"')
    assert invoke("--", *SWEEP).exit_code == 0
    install(folder, "true")
    result = invoke("--", *SWEEP)
    assert "nothing was captured" in str(result.exception)
    assert names(folder) == []


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
@pytest.mark.parametrize(
    "rest", [["--", *SWEEP], ["--repotr", "x"], ["--report", "x"], ["--dry-run"]]
)
def test_what_reading_would_not_heed_is_refused(folder: Path, tool: str, rest: list[str]) -> None:
    """Options that profile does not know are the sweep's, and --read runs none."""
    named = next(word for word in rest if word != "--")
    with refused("profile", naming="--read x.y") as caught:
        raise CliRunner().invoke(app, ["profile", tool, "--read", "x.y", *rest]).exception
    assert named in caught.value.value


def test_a_report_is_read_by_way_of_an_export(folder: Path) -> None:
    install(folder, "exit 9")
    (folder / "here" / "old.nsys-rep").write_text("report")
    result = invoke("--read", "old.nsys-rep")
    assert result.exit_code == 0, result.exception
    assert names(folder) == ["old.nsys-rep", "old.sqlite", "old.windows.csv"]


@pytest.mark.parametrize(
    ("name", "text", "naming"),
    [
        ("x.nsys-rep", "", "exit code 1"),
        ("y.sqlite", None, "no such file"),
    ],
)
def test_what_cannot_be_read_is_refused(
    folder: Path, name: str, text: str | None, naming: str
) -> None:
    install(folder, "exit 9")
    if text is not None:
        (folder / "here" / name).write_text(text)
    with refused(f"profile nsys: {name}", naming=naming):
        raise invoke("--read", name).exception


def test_a_run_without_cuda_says_so_once(folder: Path) -> None:
    export = Path(shutil.copy(unpacked("nsys_cpu"), folder / "cpu.sqlite"))
    result = invoke("--read", str(export))
    assert result.exit_code == 0, result.exception
    assert result.output.count("traced no CUDA call") == 1
    with export.with_suffix(".windows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        *("cell", "batch", "window", "process", "requests"),
        *("host_ms", "wait_ms", "busy_ms", "idle_ms", "gpu_operations"),
    ]
    measured = {"wait_ms", "busy_ms", "idle_ms", "gpu_operations"}
    assert {row[name] for row in rows for name in measured} == {""}


@pytest.mark.slow
def test_metrics_that_may_be_refused_name_the_permission(folder: Path) -> None:
    install(folder, "exit 9")
    assert "NVreg_Restrict" in str(invoke("--gpu-metrics", "--", *SWEEP).exception)
    assert "NVreg_Restrict" not in str(invoke("--", *SWEEP).exception)


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
        written = ["nwor-nsys.nsys-rep", "nwor-nsys.sqlite", "nwor-nsys.windows.csv"]
        assert names(folder) == ["began", *written]


@pytest.mark.slow  # processes
def test_sigterm_is_handed_on_to_the_tool(folder: Path) -> None:
    """A CI runner's stop reaches this command alone; the tool would run on to its end."""
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


def test_a_tool_that_cannot_run_is_one_message_where_it_exports(folder: Path) -> None:
    (folder / "bin" / "nsys").write_bytes(b"no program\0")
    (folder / "bin" / "nsys").chmod(0o755)
    (folder / "here" / "x.nsys-rep").write_text("report")
    with refused(f"profile nsys: {folder / 'bin' / 'nsys'}", ToolUnavailable, naming="Exec format"):
        raise invoke("--read", "x.nsys-rep").exception
    assert names(folder) == ["x.nsys-rep"]
