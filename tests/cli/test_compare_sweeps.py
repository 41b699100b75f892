"""`compare` of two sweep folders, and `--html` of both kinds of comparison."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_run import slowed
from swept_folder import save_sweep
from synthetic_run import make_run, save_run, with_header

from nwor_bench.analysis.comparing.sweeps import short_names
from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData

Run = Callable[..., tuple[int, str, str]]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings")]


@pytest.fixture(scope="module")
def base() -> RunData:
    return make_run(blocks=8, device="cuda", aa=True)


@pytest.fixture
def sweeps(base: RunData, tmp_path: Path) -> tuple[str, str]:
    """BASE with 1, 8 and 64 requests; NEW is slower at 8 and has no 64."""
    worse = slowed(base, {("stage", "graph"): 1.05})
    place = {"dtype": "float32"}
    save_sweep(tmp_path / "base", [({"requests": r, **place}, base) for r in (1, 8, 64)])
    runs = [(1, slowed(base, {})), (8, worse), (64, None)]
    save_sweep(tmp_path / "new", [({"requests": r, **place}, run) for r, run in runs])
    return str(tmp_path / "base"), str(tmp_path / "new")


def test_runs_are_matched_by_their_place(command_line: Run, sweeps: tuple[str, str]) -> None:
    code, out, err = command_line("compare", *sweeps)
    assert (code, err) == (ExitCode.REGRESSION, "")
    rows = [line for line in out.splitlines() if "request" in line and "  " in line]
    assert [row.split("  ")[0] for row in rows] == ["1 request", "8 requests"]
    assert "REGRESSION" in rows[1]
    assert "stage x graph" in rows[1]
    assert "REGRESSION in 1, SAME in 1 of 2 runs that both have. Only in BASE: 64 requests." in (
        " ".join(out.split())
    )
    assert all(len(line) <= 80 for line in out.splitlines()[:-2])


def test_json_markdown_and_quiet(command_line: Run, sweeps: tuple[str, str]) -> None:
    told = json.loads(command_line("compare", *sweeps, "--json")[1])
    assert [run["outcome"] for run in told["runs"]] == ["SAME", "REGRESSION"]
    assert (told["only_in_base"], told["exit_code"]) == (["64 requests"], 4)
    _, out, _ = command_line("compare", *sweeps, "-q")
    assert " ".join(out.split()) == f"REGRESSION: {told['headline']}"
    _, out, _ = command_line("compare", *sweeps, "--markdown")
    assert out.startswith("# nwor-bench compare\n\n**REGRESSION: REGRESSION in 1")


def test_a_missing_run_is_inconclusive_if_strict(
    command_line: Run, base: RunData, tmp_path: Path
) -> None:
    place = {"dtype": "float32"}
    both = [({"requests": r, **place}, base) for r in (1, 8)]
    folders = str(save_sweep(tmp_path / "a", both)), str(save_sweep(tmp_path / "b", both[:1]))
    assert command_line("compare", *folders)[0] == ExitCode.OK
    assert command_line("compare", *folders, "--strict")[0] == ExitCode.INCONCLUSIVE


def test_other_models_are_refused_with_the_run(
    command_line: Run, base: RunData, tmp_path: Path
) -> None:
    other = with_header(base, "pair", target="another")
    place = {"requests": 8, "dtype": "float32"}
    folders = (
        str(save_sweep(tmp_path / "a", [(place, base)])),
        str(save_sweep(tmp_path / "b", [(place, other)])),
    )
    code, _, err = command_line("compare", *folders)
    assert code == ExitCode.INCONCLUSIVE
    assert "8 requests" in err
    assert "pair.target: BASE toy-target, NEW another" in err
    assert command_line("compare", *folders, "--force")[0] == ExitCode.OK


def test_a_sweep_is_not_compared_with_a_run(
    command_line: Run, base: RunData, sweeps: tuple[str, str]
) -> None:
    save_run(base, Path("run"))
    code, _, err = command_line("compare", sweeps[0], "run")
    assert code == ExitCode.BAD_USAGE
    assert "name one run in it, or two sweeps" in err


def test_pages(command_line: Run, base: RunData, sweeps: tuple[str, str]) -> None:
    save_run(base, Path("a"))
    save_run(slowed(base, {("stage", "graph"): 1.05}), Path("b"))
    code, _, err = command_line("compare", "a", "b", "--html", "runs.html")
    assert (code, err) == (ExitCode.REGRESSION, "")
    page = Path("runs.html").read_text(encoding="utf-8")
    assert '<span class="badge b-slower">REGRESSION</span>' in page
    command_line("compare", *sweeps, "--html", "sweeps.html")
    page = Path("sweeps.html").read_text(encoding="utf-8")
    assert page.count("<details>") == 2


def test_names_leave_out_what_all_share() -> None:
    names = ["toy, short, 1 request", "toy, short, 8 requests"]
    assert list(short_names(names).values()) == ["1 request", "8 requests"]
    assert short_names(["toy, short"]) == {"toy, short": "toy, short"}
