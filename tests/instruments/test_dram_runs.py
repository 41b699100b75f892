"""--counters dram: the process starts again, and an engine on the CPU with simulated counters."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_engine import accept_arguments
from refusals import refused

from nwor_bench.analysis.dram import cell_bytes
from nwor_bench.cli import app as cli
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.instruments import pm_sampling
from nwor_bench.instruments.pm_sampling import INTERVAL_NS, PmSamples
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunStore, read_run
from nwor_bench.run.prepare import PairChoice, run_one
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


def begun_run(folder: Path, counters: str | None) -> Path:
    spec = resolve(load_scenario("short"), counters=counters)
    RunStore.create(folder, RunHeader(spec=spec.to_dict()))
    return folder


def begun_sweep(folder: Path, counters: str | None) -> Path:
    sweep = SweepFile(name="small", settings=Settings(counters=counters and Counters(counters)))
    SweepIndex.create(folder, sweep, group_by_engine(make_points(sweep)), "now")
    return folder


def sweep_file(folder: Path, counters: str | None) -> Path:
    folder.mkdir()
    path = folder / "small.toml"
    path.write_text("" if counters is None else f'[settings]\ncounters = "{counters}"\n')
    return path


def test_what_a_sweep_was_begun_with_counts_not_the_file_beside_it(tmp_path: Path) -> None:
    folder, file = begun_sweep(tmp_path / "out", "dram"), sweep_file(tmp_path / "now", None)
    assert reads_dram(None, RunOptions(resume=folder, file=file))


class Replaced(BaseException):
    """What execve never comes back from."""


@pytest.mark.parametrize("counters", ["dram", None])
@pytest.mark.parametrize(
    ("flag", "begin"),
    [("--resume", begun_run), ("--resume", begun_sweep), ("--file", sweep_file)],
)
def test_the_command_starts_again_if_counters_are_read(
    flag: str,
    begin: Callable[[Path, str | None], Path],
    counters: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_surroundings: None,
) -> None:
    seen: list[dict[str, str]] = []

    def execve(path: str, arguments: list[str], environ: dict[str, str]) -> None:
        seen.append(environ)
        raise Replaced

    monkeypatch.setattr("nwor_bench.engine.preflight.uses_gpu", lambda: True)  # else refused
    monkeypatch.setattr(pm_sampling, "cupti_folder", lambda: FOLDER)
    monkeypatch.setattr(pm_sampling.os, "execve", execve)
    monkeypatch.delenv(pm_sampling.DONE, raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    path = begin(tmp_path / "it", counters)
    asked = RunOptions(**{flag.strip("-"): path})
    assert reads_dram("dram", asked)
    assert reads_dram(None, asked) is (counters == "dram")
    monkeypatch.setattr(sys, "argv", ["nwor-bench", "sweep", flag, str(path), "--seed", "-1"])
    with pytest.raises(Replaced if counters else SystemExit) as ended:  # before the seed's refusal
        cli.main()
    if counters:
        assert [environ["LD_LIBRARY_PATH"] for environ in seen] == [f"{FOLDER}:/before"]
        assert pm_sampling.cupti_environment(seen[0], FOLDER) is None  # once
    else:
        assert (ended.value.code, seen) == (ExitCode.BAD_USAGE, [])


def test_counters_are_not_for_ray(own_surroundings: None, tmp_path: Path) -> None:
    sweep = load_sweep(sweep_file(tmp_path / "it", "dram"))
    asked = RunOptions(output=tmp_path / "out", ray=True)
    with refused("--ray", value=True, naming="counters under [settings]"):
        run_loaded(sweep, asked, check_engine=accept_arguments)
    assert not (tmp_path / "out").exists()
    folder = begun_sweep(tmp_path / "begun", "dram")
    with refused("--ray", value=True, naming="counters under [settings]"):
        resume_sweep(folder, options=RunOptions(ray=True), check_engine=accept_arguments)


# Through an engine.

RATES = (0.02, 0.003)
"""Bytes read and written in a nanosecond while an engine's step is under way."""


class SimulatedGpu:
    """A StreamSampler: time is the host's, traffic is made up and known."""

    skew_ns = 137_000
    """What the two clocks differ by."""
    copy_bytes = 4_000_000

    def __init__(self) -> None:
        self.opened = self.closed = 0
        self.counts_copies = 1.0
        self._began = self._zero = 0
        self._copies: list[tuple[int, int]] = []
        self._marks: list[int] = []

    def start(self) -> None:
        self.opened += 1
        self._began = time.time_ns()
        self._copies, self._marks = [], []

    def stop(self, seconds: float) -> PmSamples:
        assert seconds > 0
        starts = np.arange(self._began, time.time_ns(), INTERVAL_NS, dtype=np.int64)
        ends = starts + INTERVAL_NS

        def overlap(begin: int, end: int) -> np.ndarray:
            return np.clip(np.minimum(ends, end) - np.maximum(starts, begin), 0, None).astype(float)

        values = np.zeros((len(starts), 2))
        for begin, end in self._copies:
            share = overlap(begin, end) / (end - begin)
            values[:, 0] += share * self.copy_bytes * self.counts_copies
        steps = self._marks[6:-6]  # three copies before a batch and after it have two marks each
        values += overlap(steps[0], steps[-1])[:, None] * np.array(RATES)
        return PmSamples(starts + self.skew_ns, ends + self.skew_ns, values)

    def close(self) -> None:
        self.closed += 1

    def anchor(self) -> int:
        self._zero = time.time_ns()
        return self._zero

    def mark(self) -> int:
        self._marks.append(time.time_ns())
        return self._marks[-1]

    def ns(self, mark: int) -> float:
        return float(mark - self._zero)

    def copy(self) -> None:
        begin = time.time_ns()
        time.sleep(0.001)
        self._copies.append((begin, time.time_ns()))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, figures_left_out: None) -> SimulatedGpu:
    from nwor_bench.plugin.observe import window_counters

    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "off" if "MODE" in name else "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    gpu = SimulatedGpu()
    monkeypatch.setattr(window_counters, "StreamSampler", lambda: gpu)
    monkeypatch.setattr("nwor_bench.engine.arguments.check_counters", lambda has_gpu: None)
    monkeypatch.setattr("nwor_bench.engine.preflight.uses_gpu", lambda: True)
    return gpu


def run_counted(folder: Path) -> ExitCode:
    spec = resolve(
        load_scenario("short"), requests=4, max_new_tokens=40, max_model_len=512, batches=3,
        warmup=1, scv_modes="off", counters="dram", max_warmup=1,
    )  # fmt: skip
    return run_one(spec, PairChoice(pair="tiny"), RunOptions(output=folder))


@pytest.mark.engine
@pytest.mark.long
def test_windows_get_the_bytes_of_their_own_time(tmp_path: Path, gpu: SimulatedGpu) -> None:
    folder = tmp_path / "run"
    assert run_counted(folder) is ExitCode.OK
    run = read_run(folder)
    counted = [batch for batch in run.batches if batch.phase == "counters"]
    assert [b.block for b in counted] == sorted([1, 2, 3] * 3)
    assert (gpu.opened, gpu.closed) == (len(counted), 1)
    for batch in run.batches:
        own = [w for w in run.windows if (w.batch, w.block) == (batch.batch, batch.block)]
        assert len(own) == batch.windows
        assert all((w.dram_write_bytes is not None) == (batch in counted) for w in own)
    windows = [w for w in run.windows if w.dram_write_bytes is not None]
    for window in windows:  # a window lasts longer than its wall time on the V1 runner, not less
        assert window.wall_ms is not None
        assert window.dram_read_bytes == pytest.approx(
            window.dram_write_bytes * RATES[0] / RATES[1], rel=1e-3, abs=20
        )
        assert window.dram_read_bytes >= window.wall_ms * 1e6 * RATES[0] * 0.95 - 2000
    together = sum(w.dram_read_bytes or 0 for w in windows)
    spent = sum(batch.latency_ms for batch in counted) * 1e6 * RATES[0]
    assert 0.2 * spent < together < spent
    cells = cell_bytes(run)
    assert [cell.blocks for cell in cells] == [3, 3, 3]
    for cell in cells[1:]:
        assert cell.matched > 10
        assert set(cell.differences) == {"dram_read_bytes", "dram_write_bytes"}
    report = (folder / "report.md").read_text()
    assert "DRAM bytes: stage x off" in report
    assert "Measured by the GPU itself (CUPTI PM sampling)" in report
    header = pd.read_csv(folder / "windows.csv", nrows=0).columns
    assert {"dram_read_bytes", "dram_write_bytes"} <= set(header)


@pytest.mark.engine
@pytest.mark.long
def test_counters_that_cannot_be_trusted_end_the_run(tmp_path: Path, gpu: SimulatedGpu) -> None:
    gpu.counts_copies = 0.8
    with refused("--counters dram", BenchError):
        run_counted(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert all(window.dram_write_bytes is None for window in run.windows)
    assert [batch for batch in run.batches if batch.phase == "timed"]


@pytest.mark.engine
def test_without_a_gpu_there_is_one_message_and_nothing_starts(tmp_path: Path) -> None:
    with refused("--counters", value="dram") as refusal:
        run_counted(tmp_path / "run")
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "run").exists()
