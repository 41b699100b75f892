"""`nwor-bench compare` as a user meets it: output, files, exit codes."""

import gzip
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from changed_run import slowed
from command_calls import parse
from synthetic_run import change_batches, make_run, save_run, with_header, with_parts

pytestmark = pytest.mark.slow  # whole runs


CHECKOUT = Path(__file__).resolve().parents[2]
CI_EXAMPLE = CHECKOUT / "sweeps/ci-example.yml"
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


def commands_in(workflow: Path) -> list[list[str]]:
    """The arguments of every nwor-bench call in a workflow's `run` steps."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    lines = "\n".join(scripts).replace("\\\n", " ").splitlines()
    return [
        shlex.split(line.partition(">")[0])[1:] for line in lines if line.startswith("nwor-bench ")
    ]


def test_the_example_for_ci_calls_what_there_is() -> None:
    called = [parse(arguments) for arguments in commands_in(CI_EXAMPLE)]
    assert called == ["sweep", "compare"]
    with pytest.raises(Exception, match="No such option"):
        parse(["compare", "a", "b", "--no-such-flag"])


def test_the_example_for_ci_is_a_workflow() -> None:
    workflow = yaml.safe_load(CI_EXAMPLE.read_text())
    (job,) = workflow["jobs"].values()
    sweep, compare = commands_in(CI_EXAMPLE)
    # YAML reads the bare word `on` as true.
    assert "pull_request" in workflow[True]
    written = sweep[sweep.index("--output") + 1]
    assert compare[2] == written
    upload = next(step for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    kept = upload["with"]["path"].split()
    assert kept == [f"{written}/", "compare.md"]
    assert {"--markdown", "--strict"} <= set(compare)
    assert set(job["env"]) <= {"TARGET_MODEL", "DRAFT_MODEL"}
