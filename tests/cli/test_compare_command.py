"""`nwor-bench compare` as a user meets it: output, files, exit codes."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from changed_run import slowed
from synthetic_run import change_batches, make_run, save_run, with_header, with_parts

pytestmark = pytest.mark.slow  # whole runs


BASE = make_run(blocks=6, device="cuda", aa=True)
RUNS = {
    "base": BASE,
    "same": slowed(BASE, {}),
    "slower": slowed(BASE, {("stage", "graph"): 1.05}),
    "noisy": slowed(BASE, {}, noise=0.2),
    "unsure": slowed(BASE, {("stage", "graph"): 1.006}, noise=0.006),
    "checked": with_header(make_run(blocks=0, device="cuda", aa=True), "scenario", batches=0),
    "cut": with_parts(make_run(blocks=1, device="cuda", aa=True), status="partial"),
    "broken": with_header(
        change_batches(
            make_run(blocks=0, device="cuda", aa=True),
            lambda batch: batch.nwor_mode == "stage",
            parity="INVALID",
        ),
        "scenario",
        batches=0,
    ),
    "long": with_header(slowed(BASE, {}), "scenario", name="long", requests=8),
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run folder for each of RUNS."""
    root = tmp_path_factory.mktemp("runs")
    for name, run in RUNS.items():
        save_run(run, root / name)
    (root / "stored").mkdir()
    (root / "stored/run.json").write_bytes((root / "base/run.json").read_bytes())
    packed = gzip.compress((root / "base/records.jsonl").read_bytes())
    (root / "stored/records.jsonl.gz").write_bytes(packed)
    return root


@pytest.fixture
def run(
    runs: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run, figures_left_out: None
) -> Run:
    """Run a command line beside the runs: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(runs)
    return command_line


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("base base", 0),
        ("base same", 0),
        ("stored same", 0),
        ("base slower", 4),
        ("stored slower", 4),
        ("slower base --strict", 0),
        ("base slower --threshold 10%", 0),
        ("base noisy", 5),
        ("base noisy --threshold 90%", 0),
        ("base unsure", 0),
        ("base unsure --strict", 5),
        ("base slower --strict", 4),
        ("checked checked", 5),
        ("cut cut", 5),
        ("base cut", 5),
        ("checked broken", 4),
        ("broken checked", 5),
        ("base long", 5),
        ("base long --force", 0),
        ("base slower --decide-by time", 4),
    ],
)
def test_exit_codes(run: Run, arguments: str, code: int) -> None:
    got, out, err = run("compare", *arguments.split())
    assert got == code
    assert max(map(len, (out + err).splitlines())) <= 80
    assert bool(err) == (arguments == "base long")


def test_markdown_instead_of_the_tables(run: Run) -> None:
    code, printed, _ = run("compare", "base", "slower", "--markdown")
    assert code == 4
    assert printed.startswith("# nwor-bench compare\n\n**REGRESSION: stage x graph +")


@pytest.mark.parametrize("arguments", ["base slower", "base noisy", "checked broken", "cut cut",
                                       "base long --force"])  # fmt: skip
def test_a_terminal_of_24_lines_holds_the_answer(run: Run, arguments: str) -> None:
    """The verdict, the changes and why; values and notes are in --markdown."""
    printed = run("compare", *arguments.split())[1].splitlines()
    assert len(printed) <= 23  # and the prompt
    assert "--markdown" in " ".join(printed)
    if arguments == "checked broken":
        assert any("REGRESSION: stage x off" in line for line in printed)
