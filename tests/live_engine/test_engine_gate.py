"""The gate on real vLLM: planted faults that keep the engine running but change its words."""

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from engine_tools import tiny_spec

from nwor_bench.errors import ExitCode
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("figures_left_out")]


@pytest.fixture(autouse=True)
def _runner_v1(environment_given_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def sweep(
    folder: Path, pair: str = "tiny", **changes: Any
) -> tuple[ExitCode, pd.DataFrame, dict[str, Any]]:
    """A real sweep of a generated pair; its exit code, cells and run.json."""
    usual = {"scv_modes": "off,graph", "warmup": 1, "max_warmup": 1}
    spec = tiny_spec(**{**usual, **changes})
    code = run_one(spec, PairChoice(pair=pair), RunOptions(output=folder))
    cells = pd.read_csv(folder / "cells.csv", keep_default_na=False)
    return code, cells, json.loads((folder / "run.json").read_text())


def plant_wrong_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """V of head 1 in layer 1 is committed off by a millionth: no token shows it."""
    from nwor_bench.plugin.runner_v1 import staging

    commit, layers = staging.commit_windows_reference, cycle(range(3))

    def wrong(sources: Any, *rest: Any, **named: Any) -> None:
        keys, values = sources
        if next(layers) == 1:  # one call a layer
            values = [values[0].clone()]
            values[0][:, 1] *= 1 + 1e-6
        commit((keys, values), *rest, **named)

    monkeypatch.setattr(staging, "commit_windows_reference", wrong)


def check_kv_gate(folder: Path, run: dict[str, Any]) -> None:
    """Every committed position was compared, bit for bit, and the records say so."""
    gate = run["kv_gate"]
    assert set(gate["cells"]) == {"stage x off", "stage x graph"}
    for cell in gate["cells"].values():
        assert cell["verdict"] == "equal bit for bit"
        assert cell["checked"] == cell["committed"] > 8 * 40
        assert cell["unknown"] == cell["beyond_budget"] == 0
        assert (cell["layers"], cell["ranks"]) == (3, 1)
    assert 0 < gate["seconds"] < gate["gate_seconds"]
    events = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    told = [event["verdict"] for event in events if event.get("event") == "kv_gate"]
    assert told == ["equal bit for bit"] * 3  # the last batch is one of these cells again


def test_a_sound_run_passes(tmp_path: Path) -> None:
    code, cells, run = sweep(tmp_path / "run")
    assert code is ExitCode.OK
    assert run["status"] == "complete"
    assert run["engine"]["attached"] is True
    assert run["violations"] == []
    stage = cells[(cells.nwor_mode == "stage") & (cells.scv_mode == "off")]
    counts = ["nwor_total_staged", "nwor_total_committed", "nwor_total_rejected"]
    stage = stage.astype(dict.fromkeys([*counts, "accepted_tokens"], int))
    assert set(cells.parity) == {"reference", "exact"}
    assert (stage.nwor_total_staged > 0).all()
    assert (stage.nwor_total_staged == stage.nwor_total_committed + stage.nwor_total_rejected).all()
    assert (stage.nwor_total_committed == stage.accepted_tokens).all()
    windows = pd.read_csv(tmp_path / "run" / "windows.csv", keep_default_na=False)
    assert set(windows[windows.nwor_mode == "stage"].path) == {"eager, ours, host"}
    assert set(windows[windows.nwor_mode == "off"].path) == {""}
    assert set(windows[windows.scv_mode == "graph"].fallback_reason) == {"scv:no_cuda"}
    assert set(windows[windows.scv_mode == "off"].fallback_reason) == {""}
    graph = cells[cells.scv_mode == "graph"]  # proven by the gate, so not timed
    assert list(graph.verdict) == ["INEFFECTIVE"] * 2
    assert set(graph.ratio_to_off) == {""}
    assert set(graph.batches) == {0}
    assert set(windows[windows.scv_mode == "graph"].block) == {0}
    check_kv_gate(tmp_path / "run", run)


@pytest.mark.long
def test_a_cache_that_cannot_be_staged_is_no_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, cells, _ = sweep(tmp_path / "run", cache_dtype="fp8", batches=0, max_warmup=None)
    assert code is ExitCode.INCONCLUSIVE
    idle = {(c.nwor_mode, c.scv_mode): c.reason for c in cells.itertuples() if c.reason}
    why = "no draft token was staged (most often: cache_dtype:fp8)"
    no_cuda = "it cannot run without CUDA"
    assert idle == {("off", "graph"): no_cuda, ("stage", "off"): why, ("stage", "graph"): why}
    report = (tmp_path / "run" / "report.md").read_text()
    for text in (capsys.readouterr().out, report):
        assert "NOTHING STAGED: " in text
        assert f"{why}" in " ".join(text.split())
        assert "IDENTICAL" not in text


@pytest.mark.long
def test_a_planted_fault_turns_the_cell_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_wrong_value(monkeypatch)
    code, cells, run = sweep(tmp_path / "run")
    assert code is ExitCode.CORRECTNESS_BROKEN
    stage, off = cells[cells.nwor_mode == "stage"], cells[cells.nwor_mode == "off"]
    assert set(stage.verdict) == {"INVALID"}
    assert "INVALID" not in set(off.verdict)
    timings = ["latency_ms_p50", "latency_ms_p95", "window_ms_mean", "tokens_per_s"]
    timings += ["ratio_to_off", "ratio_ci_low", "ratio_ci_high"]
    assert (stage[timings] == "").all(axis=None)
    assert "INVALID" in (tmp_path / "run" / "report.md").read_text()
    assert set(run["parity"]["broken"]) == {"stage x off", "stage x graph"}
    reason = run["parity"]["broken"]["stage x off"]
    assert reason.startswith("K/V: layer 1 (model.layers.1.self_attn.attn), request ")


@pytest.mark.long
def test_a_model_that_drafts_with_its_mtp_layer_is_swept(tmp_path: Path) -> None:
    """No drafter is named; the MTP layer drafts, stays stock, and the target's layers stage."""
    code, cells, run = sweep(tmp_path / "run", "tiny-mtp")
    assert code is ExitCode.OK
    assert set(cells.parity) == {"reference", "exact"}
    check_kv_gate(tmp_path / "run", run)
    assert (run["engine"]["target_layers"], run["engine"]["drafter_layers"]) == (3, 1)
    staged = cells[(cells.nwor_mode == "stage") & (cells.scv_mode == "off")].iloc[0]
    assert int(staged.nwor_total_staged) == int(staged.draft_tokens) > 0
    assert 0 < int(staged.nwor_total_committed) == int(staged.accepted_tokens)


@pytest.mark.long
def test_a_hybrid_whose_states_are_staged_passes_within_tolerance(tmp_path: Path) -> None:
    """Equal tokens do not make the cache equal bit for bit: states come from another kernel."""
    code, cells, run = sweep(
        tmp_path / "run", "tiny-states-mtp", requests=3, batches=1, max_new_tokens=24
    )
    assert code is ExitCode.OK
    assert run["parity"]["rule"] == "explained"
    verdicts = {cell: found["verdict"] for cell, found in run["kv_gate"]["cells"].items()}
    assert verdicts
    assert set(verdicts.values()) == {"within tolerance"}
    staged = cells[(cells.nwor_mode == "stage") & (cells.scv_mode == "off")].iloc[0]
    assert int(staged.state_bytes_committed) > 0
