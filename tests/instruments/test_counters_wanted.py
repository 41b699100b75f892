"""Who reads DRAM counters starts again under cupti-python's library: runs gone on with and sweep
files too. No GPU and no CUPTI is needed to see it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import accept_arguments
from refusals import refused

from nwor_bench.cli import app as cli
from nwor_bench.errors import ExitCode
from nwor_bench.instruments import pm_sampling
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunStore
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import resume_sweep, run_loaded
from nwor_bench.run.sweep_folder import SweepIndex, reads_dram
from nwor_bench.workload.config import load_scenario, resolve
from nwor_bench.workload.run_spec import Counters
from nwor_bench.workload.sweep_file import (
    Settings,
    SweepFile,
    group_by_engine,
    load_sweep,
    make_points,
)

FOLDER = Path("/site-packages/nvidia/cu13/lib")


def begun_run(folder: Path, counters: str | None) -> str:
    spec = resolve(load_scenario("short"), counters=counters)
    RunStore.create(folder, RunHeader(spec=spec.to_dict()))
    return str(folder)


def begun_sweep(folder: Path, counters: str | None) -> str:
    sweep = SweepFile(name="small", settings=Settings(counters=counters and Counters(counters)))
    SweepIndex.create(folder, sweep, group_by_engine(make_points(sweep)), "now")
    return str(folder)


def sweep_file(folder: Path, counters: str | None) -> str:
    folder.mkdir()
    path = folder / "small.toml"
    path.write_text("" if counters is None else f'[settings]\ncounters = "{counters}"\n')
    return str(path)


Begin = Callable[[Path, str | None], str]
BEGUN: list[tuple[str, Begin]] = [
    ("--resume", begun_run), ("--resume", begun_sweep), ("--file", sweep_file)
]  # fmt: skip


@pytest.mark.parametrize("counters", ["dram", None])
@pytest.mark.parametrize(("flag", "begin"), BEGUN)
def test_it_is_read_from_what_was_begun_or_asked_for(
    flag: str, begin: Begin, counters: str | None, tmp_path: Path
) -> None:
    path = begin(tmp_path / "it", counters)
    options = RunOptions(**{flag.strip("-"): Path(path)})
    assert reads_dram(None, options) is (counters == "dram")
    assert reads_dram("dram", options)


def test_what_a_sweep_was_begun_with_counts_not_the_file_beside_it(tmp_path: Path) -> None:
    folder = Path(begun_sweep(tmp_path / "out", "dram"))
    file = Path(sweep_file(tmp_path / "now", None))
    assert reads_dram(None, RunOptions(resume=folder, file=file))


class Replaced(BaseException):
    """What execve never comes back from."""


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, own_surroundings: None) -> list[dict[str, str]]:
    """Environments that the process was started again with."""
    seen: list[dict[str, str]] = []

    def execve(path: str, arguments: list[str], environ: dict[str, str]) -> None:
        seen.append(environ)
        raise Replaced

    monkeypatch.setattr("nwor_bench.engine.preflight.uses_gpu", lambda: True)  # else refused
    monkeypatch.setattr(pm_sampling, "cupti_folder", lambda: FOLDER)
    monkeypatch.setattr(pm_sampling.os, "execve", execve)
    monkeypatch.delenv(pm_sampling.DONE, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    return seen


@pytest.mark.parametrize(("flag", "begin"), BEGUN)
def test_the_command_starts_again_before_anything_is_measured(
    flag: str,
    begin: Begin,
    replaced: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["nwor-bench", "sweep", flag, begin(tmp_path / "it", "dram")])
    with pytest.raises(Replaced):
        cli.main()
    assert [environ["LD_LIBRARY_PATH"] for environ in replaced] == [f"{FOLDER}:/before"]
    assert pm_sampling.cupti_environment(replaced[0], FOLDER) is None  # once


def test_without_counters_the_command_goes_on(
    replaced: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep_file(tmp_path / "it", None)
    for arguments in (["--file", path], ["--resume", begun_run(tmp_path / "run", None)]):
        monkeypatch.setattr(sys, "argv", ["nwor-bench", "sweep", *arguments, "--seed", "-1"])
        with pytest.raises(SystemExit) as ended:  # refused later, for the flag
            cli.main()
        assert ended.value.code == ExitCode.BAD_USAGE
    assert replaced == []


def test_counters_are_not_for_ray(own_surroundings: None, tmp_path: Path) -> None:
    path = Path(sweep_file(tmp_path / "it", "dram"))
    asked = RunOptions(output=tmp_path / "out", ray=True)
    with refused("--ray", value=True, naming="counters under [settings]"):
        run_loaded(load_sweep(path), asked, check_engine=accept_arguments)
    assert not (tmp_path / "out").exists()
    folder = Path(begun_sweep(tmp_path / "begun", "dram"))
    with refused("--ray", value=True, naming="counters under [settings]"):
        resume_sweep(folder, options=RunOptions(ray=True), check_engine=accept_arguments)
