"""`nwor-bench kernels` on a stand-in bench: files, exit codes, --json and --quiet."""

import json
from pathlib import Path

import pytest
from documented_keys import lacking
from fake_bench import FACTS, make_bench
from refusals import refused
from rich.console import Console

from nwor_bench.errors import ExitCode
from nwor_bench.run.microbench.bench import run_kernels
from nwor_bench.run.microbench.cases import Spec, Window

pytestmark = pytest.mark.usefixtures("own_surroundings")

SPEC = Spec(kernels=("commit",), windows=(Window(8, 4),), max_rounds=3)


def session(folder: Path | None, faults: dict[str, object] | None = None, **shown: bool) -> int:
    bench = make_bench(SPEC, **(faults or {})), FACTS
    return run_kernels(Console(width=80), SPEC, folder, make_bench=lambda _: bench, **shown)


def test_json_and_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(folder: str, **shown: bool) -> str:
        assert session(Path(folder), **shown) == ExitCode.OK
        return capsys.readouterr().out

    told = json.loads(printed("a", as_json=True))
    assert lacking(told, "kernels") == []
    assert told["folder"] == "a"
    kept = json.loads(Path("a/kernels.json").read_text())
    assert {name: told[name] for name in kept} == kept
    quiet, every = printed("b", quiet=True), printed("c")
    assert len(quiet.splitlines()) < len(every.splitlines())
    assert quiet.splitlines()[-1].startswith("Files: b/kernels.csv")


def test_a_wrong_result_is_exit_code_3_and_the_files_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = session(tmp_path / "out", {"wrong": {"vllm_cuda": "layer 0: 2 bytes"}})
    assert code == ExitCode.CORRECTNESS_BROKEN
    assert "INVALID" in (tmp_path / "out" / "kernels.csv").read_text()
    assert "INVALID" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_writes_three_files_and_never_over_an_older_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert session(None) == ExitCode.OK
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("Z-kernels")
    assert str(folder.relative_to(tmp_path)) in capsys.readouterr().out
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert before.keys() == {"kernels.csv", "kernels.json", "kernels.md"}
    assert json.loads(before["kernels.json"])["environment"]["packages"]
    with refused("--output", value=str(folder)):
        session(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before
    (tmp_path / "file").touch()
    with refused("--output", naming="Not a directory"):
        session(tmp_path / "file" / "out")
