"""`nwor-bench kernels` on a stand-in bench: files, exit codes, --json and --quiet."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from documented_keys import lacking
from fake_bench import FACTS, make_bench
from refusals import refused
from rich.console import Console

from nwor_bench.errors import ExitCode
from nwor_bench.instruments import device
from nwor_bench.run.microbench import bench
from nwor_bench.run.microbench.bench import run_kernels
from nwor_bench.run.microbench.cases import Heads, Spec, Window

pytestmark = pytest.mark.usefixtures("own_surroundings")

SPEC = Spec(kernels=("commit",), windows=(Window(8, 4),), max_rounds=3)


def session(folder: Path | None, faults: dict[str, object] | None = None, **shown: bool) -> int:
    made = make_bench(SPEC, **(faults or {})), FACTS
    return run_kernels(Console(width=80), SPEC, folder, make_bench=lambda _: made, **shown)


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


def test_the_shape_is_the_models(
    command_line: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    ran: list[Spec] = []
    monkeypatch.setattr(device, "visible_gpu_uuids", lambda: ("GPU-0",))
    monkeypatch.setattr(bench, "run_kernels", lambda _, spec, *__, **___: ran.append(spec) or 0)
    for model, heads, dim, layers in (
        ("llama-8b-shape", Heads(32, 8), 128, 32),
        ("gemma-3-12b-shape", Heads(16, 8), 256, 8),  # those without a sliding window
    ):
        assert command_line("kernels", "--kernels", "attention", "--model", model)[0] == 0
        spec, shape = ran[-1], ran[-1].shape
        assert (spec.heads, shape.heads, shape.kv_heads) == ((heads,), heads.query, heads.kv)
        assert (shape.head_dim, shape.layers) == (dim, layers)
    for flags in (["--heads", "8/1"], ["--layers", "3"], ["--head-dim", "64"]):
        code, _, said = command_line("kernels", "--model", "llama-8b-shape", *flags)
        assert (code, flags[0] in said, "leave these out" in said) == (2, True, True), said
    for unknown in ("mla-shape", "llama-9b-shape"):
        code, _, said = command_line("kernels", "--model", unknown)
        assert code == 2
        assert "--model: " in said
        assert unknown in said
    assert len(ran) == 2


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
