"""`nwor-bench profile`: command lines, missing tools, and where reports and tables lie."""

import csv
import re
import shlex
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from simulated_ncu_report import Action, report_of
from typer.testing import CliRunner

from nwor_bench.cli.app import app
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.nsight import ncu, tools
from nwor_bench.instruments.nsight.ncu import (
    METRICS,
    graph_warning,
    ncu_command,
    numbers_regex,
)
from nwor_bench.records.store import read_run

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
    assert pairs["--metrics"].split(",") == list(METRICS.values())


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
        (["ncu", "--dry-run", "--run", "runs/x", "--", "sweep"], "--run"),
        (["nsys", "--dry-run", "--capture", "window", "--", "sweep"], "--capture"),
    ],
)
def test_what_cannot_run_is_refused(arguments: list[str], message: str) -> None:
    result = invoke("profile", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_a_missing_tool_is_one_message_and_no_table(
    tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "PLACES", {"ncu": (), "nsys": ()})
    result = invoke("profile", tool, "--", *SWEEP)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.exit_code == 2
    assert "is not installed" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "version"),
    [("Version 2019.5.0", "2019.5.0"), ("no number here", "no number here")],
)
def test_an_old_tool_is_refused(says: str, version: str, tmp_path: Path) -> None:
    tool = script(tmp_path / "ncu", f"echo '{says}'")
    with refused(f"profile ncu: {tool}", tools.ToolUnavailable, value=version):
        tools.check_version("ncu", tool)


def test_a_tool_that_fails_leaves_no_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "ncu", 'case "$1" in --version) echo "Version 2025.3.1.0";; *) exit 9;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.chdir(tmp_path)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert isinstance(result.exception, ConfigError)
    assert "exit code 9" in str(result.exception)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["ncu"]


def test_a_report_is_kept_where_the_module_is_missing(here: Path) -> None:
    script(here / "../bin/ncu", WRITES)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert "ncu_report does not load" in str(result.exception)
    assert "nwor-bench profile ncu --read nwor-ncu.ncu-rep" in result.output
    assert Path("nwor-ncu.ncu-rep").read_text() == "report\n"


WRITES = (
    'case "$1" in --version) echo "Version 2025.3.1.0";; *) while [ "$1" != --export ]; '
    'do shift; done; echo report > "$2.ncu-rep";; esac'
)
WRITES_NONE = 'case "$1" in --version) echo "Version 2025.3.1.0";; esac'


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working folder; `script(here / "../bin" / tool, ...)` installs a tool."""
    for name in ("bin", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.setattr(tools, "ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_an_earlier_report_is_not_taken_for_this_runs(here: Path) -> None:
    for earlier in ("nwor-ncu.ncu-rep", "nwor-ncu.windows.csv"):
        (here / earlier).write_text("of another run")
    script(here / "../bin/ncu", WRITES_NONE)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert isinstance(result.exception, ConfigError)
    assert "wrote no report" in str(result.exception)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in str(result.exception)
    assert list(here.iterdir()) == []


def test_ctrl_c_is_no_failure_of_ncus(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "run_tool", lambda command, **_: ExitCode.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        ncu.run_profile(["ncu"], Path("r"))


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


@pytest.mark.parametrize("source", ["none.ncu-rep", "folder"])
def test_a_report_to_read_that_is_none_is_named_before_the_module(source: str, here: Path) -> None:
    (here / "folder").mkdir()
    result = invoke("profile", "ncu", "--read", source)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"profile ncu: {source}: there is no such file"


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
@pytest.mark.parametrize("text", ["printf '\\377\\376'", None], ids=["no text", "no program"])
def test_a_tool_that_is_none_is_one_message(tool: str, text: str | None, here: Path) -> None:
    path = script(here / "../bin" / tool, text or "")
    if text is None:
        path.write_bytes(b"\x7fELF and no more")
    with refused(path.name, tools.ToolUnavailable, naming=tools.PRODUCT[tool]):
        raise invoke("profile", tool, "--", *SWEEP).exception


@pytest.mark.parametrize(
    "rest", [["--", *SWEEP], ["--repotr", "x"], ["--report", "x"], ["--dry-run"]]
)
def test_an_option_that_reading_ignores_is_refused(here: Path, rest: list[str]) -> None:
    """Options that profile does not know are the sweep's, and --read runs none."""
    named = next(word for word in rest if word != "--")
    with refused("profile", naming="--read x.y") as caught:
        raise invoke("profile", "ncu", "--read", "x.y", *rest).exception
    assert named in caught.value.value


def test_graphs_are_warned_of() -> None:
    dry = invoke("profile", "ncu", "--dry-run", "--", "sweep")
    assert "enforce_eager" in dry.stderr
    assert "enforce_eager" not in dry.stdout
    assert graph_warning(SWEEP) is None
    assert graph_warning(["sweep", '--engine-args={"enforce_eager": true}']) is None
    warning = graph_warning(["sweep", "--engine-args", '{"enforce_eager": false}'])
    assert warning is not None
    assert "--counters dram" in warning


GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "run"


def test_windows_are_named_by_the_cells_of_the_sweeps_own_run(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the one that the profiled sweep has made, in its last pass."""
    earlier = here / "runs" / "20990101T000000Z-short-tiny"
    shutil.copytree(GOLDEN, earlier)
    made = [f"runs/2026010{number}T000000Z-short-tiny" for number in (1, 2)]
    copies = "; ".join(f"mkdir {run}; cp {GOLDEN}/* {run}" for run in made)
    script(here / "../bin/ncu", WRITES.replace("echo report", f"{copies}; echo report"))
    batches = read_run(GOLDEN).batches
    actions = [Action((("batch", b.batch), ("window", 0)), gpu_ns=(5, "ns")) for b in batches]
    module, table = report_of(*actions), here / "nwor-ncu.windows.csv"
    monkeypatch.setattr("nwor_bench.instruments.nsight.ncu.load_module", lambda ncu: module)
    result = invoke("profile", "ncu", "--", *SWEEP)
    assert result.exit_code == 0, result.exception
    assert f"--read nwor-ncu.ncu-rep --run {made[1]})" in result.stderr
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["cell"] for row in rows] == [f"{b.nwor_mode} x {b.scv_mode}" for b in batches]
    assert len({row["cell"] for row in rows}) > 1
    early = [b for b in batches if b.phase != "timed"]
    assert early == list(batches[: len(early)])
    skip = sum(batch.windows for batch in early)
    assert f"{len(early)} of {len(batches)} windows belong to warm-up and gate" in result.stderr
    assert f"--skip {skip}, " in result.stderr

    again = invoke("profile", "ncu", "--read", "nwor-ncu.ncu-rep", "--run", made[1])
    assert again.exit_code == 0, again.exception
    with table.open(newline="") as file:
        assert list(csv.DictReader(file)) == rows
    invoke("profile", "ncu", "--read", "nwor-ncu.ncu-rep")
    with table.open(newline="") as file:
        assert {row["cell"] for row in csv.DictReader(file)} == {""}  # not known


def test_ncus_command_needs_no_shell() -> None:
    command = ncu_command(Path("/x y/ncu"), SWEEP, Path("r e p"), 1, 0)
    assert command[0] == "/x y/ncu"
    assert "r e p" in command
