"""--counters dram through a real engine on the CPU, with a stand-in for the GPU's counters."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from refusals import refused
from simulated_counters import RATES, SimulatedGpu

from nwor_bench.analysis.dram import cell_bytes
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.records.store import read_run
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import load_scenario, resolve

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("figures_left_out")]

WANTED = {"requests": 4, "max_new_tokens": 40, "max_model_len": 512, "batches": 3, "warmup": 1}


@pytest.fixture(autouse=True)
def _environment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_NWOR_MODE", "VLLM_SCV_MODE", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "off" if "MODE" in name else "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    from nwor_bench.plugin.observe import window_counters as counted_windows

    gpu = SimulatedGpu()
    monkeypatch.setattr(counted_windows, "open_instruments", lambda: (gpu, gpu))
    monkeypatch.setattr("nwor_bench.engine.arguments.check_counters", lambda has_gpu: None)
    monkeypatch.setattr("nwor_bench.engine.preflight.uses_gpu", lambda: True)
    return gpu


def spec(**changes: Any) -> Any:
    flags = {"scv_modes": "off", "counters": "dram", "max_warmup": 1, **changes}
    return resolve(load_scenario("short"), **WANTED, **flags)


@pytest.mark.long
def test_windows_get_the_bytes_of_their_own_time(tmp_path: Path, gpu: SimulatedGpu) -> None:
    code = run_one(spec(), PairChoice(pair="tiny"), RunOptions(output=tmp_path / "run"))
    assert code is ExitCode.OK
    run = read_run(tmp_path / "run")
    counted = [batch for batch in run.batches if batch.phase == "counters"]
    assert [b.block for b in counted] == sorted([1, 2, 3] * 3)
    assert gpu.opened == len(counted)
    assert gpu.closed == 1
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
    facts = [event for event in run.events if event.get("event") == "counters"]
    assert len(facts) == len(counted)
    for fact in facts:
        assert fact["copies_found"] == fact["copies_made"] == 6
        assert fact["clock_to_host_us"] == pytest.approx(gpu.skew_ns / 1e3, abs=30)
    cells = cell_bytes(run)
    assert [cell.blocks for cell in cells] == [3, 3, 3]
    for cell in cells[1:]:
        assert cell.matched > 10
        assert set(cell.differences) == {"dram_read_bytes", "dram_write_bytes"}
    report = (tmp_path / "run" / "report.md").read_text()
    assert "DRAM bytes: stage x off" in report
    assert "Measured by the GPU itself (CUPTI PM sampling)" in report
    header = pd.read_csv(tmp_path / "run" / "windows.csv", nrows=0).columns
    assert {"dram_read_bytes", "dram_write_bytes"} <= set(header)


@pytest.mark.long
def test_counters_that_cannot_be_trusted_end_the_run(tmp_path: Path, gpu: SimulatedGpu) -> None:
    gpu.counts_copies = 0.8
    with refused("--counters dram", BenchError):
        run_one(spec(), PairChoice(pair="tiny"), RunOptions(output=tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert all(window.dram_write_bytes is None for window in run.windows)
    assert [batch for batch in run.batches if batch.phase == "timed"]


def test_without_a_gpu_there_is_one_message_and_nothing_starts(tmp_path: Path) -> None:
    with refused("--counters", value="dram") as refusal:
        run_one(spec(), PairChoice(pair="tiny"), RunOptions(output=tmp_path / "run"))
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "run").exists()
