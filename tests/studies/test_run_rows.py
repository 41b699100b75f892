"""Run folders become rows of each study's CSV."""

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas as pd
import pytest

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase

CHECKOUT = Path(__file__).resolve().parents[2]
KEPT = CHECKOUT / "sweeps" / "results" / "kept" / "llama-3b-shape-ctx-1k"


read_once = cache(read_run)


@cache
def kept_analysis() -> object:
    return analyse(read_once(KEPT))


@pytest.fixture
def run_rows(study: Callable[[str, str], ModuleType]) -> ModuleType:
    """The script that reads run folders."""
    return study("", "run_rows")


@pytest.fixture
def kept_rows(run_rows: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which reads the kept run once for all tests."""
    monkeypatch.setattr(run_rows, "read_run", read_once)
    monkeypatch.setattr(run_rows, "analyse", lambda _: kept_analysis())
    return run_rows


def test_a_row_a_cell_with_the_figures_that_the_run_stored(kept_rows: ModuleType) -> None:
    rows = kept_rows.rows_of(kept_rows.STUDIES["runs"], KEPT, KEPT.name)
    cells = json.loads((KEPT / "run.json").read_text())["cells"]
    fields = {
        "n": "batches", "verdict": "verdict", "ratio": "ratio_to_off",
        "ratio_low": "ratio_ci_low", "ratio_high": "ratio_ci_high",
    }  # fmt: skip
    for column, field in fields.items():
        found, stored = [row[column] for row in rows], [cell[field] for cell in cells]
        # Processors differ in a sum's last bit.
        assert found == [pytest.approx(s, rel=1e-12) if isinstance(s, float) else s for s in stored]
    assert {(r["run"], r["gpu"], r["commit"]) for r in rows} == {
        (KEPT.name, "NVIDIA H100 80GB HBM3", "d784d57040ee")
    }
    assert "off x off (A/A)" in {row["cell"] for row in rows}
    assert [bool(row["command"]) for row in rows] == [True] + [False] * (len(rows) - 1)


FACTS: list[tuple[str, dict[str, object]]] = [
    ("runs", {"cell": "control x off", "n": 3, "forward_ms": 3.3105, "sample_ms": 0.3675,
              "mask_ms": None, "commit_ms": 0.0089, "hooks_ms": 0.0645, "synthetic_length": None}),
    ("runs", {"cell": "stage x adaptive", "deciding_ms": 0.0821, "first_mismatch": None}),
    ("interleave", {"cell": "control x off", "ratio_ci_low": 0.9774, "clock_low_mhz": 1965}),
    ("interleave", {"cell": "stage x graph over control x off", "ratio_to_off": 0.9838}),
    ("states", {"cell": "control x off", "windows": 2231, "kv_verdict": "within tolerance"}),
    ("one-slot", {"cell": "control x off", "phase": "timed", "at_once": 8, "latency_ms": 254.1}),
    ("two-clocks", {"step_ms": 5.6241, "tokens_per_s_percent": 2.2258, "attention": "ours"}),
    ("gated", {"cell": "control x off", "ready_gate": 0, "kv_layers": 28, "local_layers": 28}),
    ("mtp", {"layers": 28, "positions_checked": 8696, "verdict_of_off": "reference"}),
]  # fmt: skip
"""What one row of the kept run says."""


@pytest.mark.parametrize(("name", "facts"), FACTS)
def test_rows_have_the_columns_of_the_studys_csv(
    kept_rows: ModuleType, name: str, facts: dict[str, object]
) -> None:
    study = kept_rows.STUDIES[name]
    rows = kept_rows.rows_of(study, KEPT, "a run", host=1)
    known = pd.read_csv(kept_rows.SWEEPS / study.file, nrows=0).columns
    assert all(list(row) == list(known) for row in rows)
    assert set(study.setting.split()) <= set(known)
    assert (len(rows) == 1) is (name == "mtp")
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    assert any(facts.items() <= row.items() for row in rounded)


def test_only_the_gates_mismatch_counts(run_rows: ModuleType) -> None:
    own, other = (run_rows.Cell("a", "off", scv) for scv in ("off", "graph"))
    kinds = [(own, Phase.TIMED, "timed"), (other, Phase.GATE, "another cell's"),
             (own, Phase.GATE, ""), (own, Phase.GATE, "4 of 8 differ")]  # fmt: skip
    batches = [SimpleNamespace(cell=c, phase=p, first_mismatch=text) for c, p, text in kinds]
    assert run_rows.mismatch_of(SimpleNamespace(batches=batches), own) == "4 of 8 differ"
    assert run_rows.mismatch_of(SimpleNamespace(batches=batches[:3]), own) is None


def test_the_cache_dtype_and_the_synthetic_length_are_the_runs_own(
    run_rows: ModuleType, tmp_path: Path
) -> None:
    header = json.loads((KEPT / "run.json").read_text())
    header["spec"]["engine_args"] = {"kv_cache_dtype": "fp8"}
    header["pair"]["speculative"] = {"synthetic_acceptance_length": 2.6}
    header["spec"]["speculative_config"] = {"synthetic_acceptance_length": 1.4}
    facts = run_rows.facts_of_run(tmp_path, "a run", header)
    assert (facts["cache_asked"], facts["acceptance"]) == ("fp8", 1.4)
    (tmp_path / "run.json").write_text(json.dumps(header | {"status": "failed"}))
    assert run_rows.rows_of(run_rows.STUDIES["runs"], tmp_path, "a run") == []


HEAD = "pair,gpu,requests,drafts,context,cache,cell,groups,step_ms\n"
BEFORE = HEAD + (
    "a,H200,8,4,1024,auto,off x off,,4.80\n"
    "a,H200,8,4,1024,auto,stage x adaptive,64.0,4.70\n"
    "a,H200,8,4,8192,auto,off x off,,9.10\n"
    "text,H200,8,4,,auto,off x off,,1.20\n"
    "text,H200,8,4,,fp8,off x off,,1.30\n"
    "null,H200,8,4,,fp8,off x off,,1.40\n"
)


def test_rows_of_the_same_setting_are_replaced_and_others_stay_as_written(
    run_rows: ModuleType, tmp_path: Path
) -> None:
    """The context tells settings apart, and real text has none."""
    file = tmp_path / "cells.csv"
    file.write_text(BEFORE)
    shared = {"gpu": "H200", "requests": 8, "drafts": 4, "cache": "auto", "cell": "off x off"}
    rows = [
        {"pair": "a", "context": 1024, "groups": None, "step_ms": 4.61234567},
        {"pair": "text", "context": None, "groups": None, "step_ms": 1.1},
        {"pair": "a", "context": 1024, "groups": 12, "step_ms": 4.5, "cell": "stage x adaptive"},
    ]
    setting = run_rows.STUDIES["two-clocks"].setting.split()
    run_rows.add_rows(file, pd.DataFrame([shared | row for row in rows]), setting)
    assert file.read_text() == HEAD + (
        "a,H200,8,4,8192,auto,off x off,,9.10\n"
        "text,H200,8,4,,fp8,off x off,,1.30\n"
        "null,H200,8,4,,fp8,off x off,,1.40\n"
        "a,H200,8,4,1024,auto,off x off,,4.612346\n"
        "text,H200,8,4,,auto,off x off,,1.1\n"
        "a,H200,8,4,1024,auto,stage x adaptive,12,4.5\n"
    )


@pytest.mark.slow
def test_runs_below_a_folder_are_named_by_their_path(
    run_rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows are equal bytes, compressed too."""
    shutil.copytree(KEPT, tmp_path / "sweep" / "first")
    file = tmp_path / "runs.csv.gz"
    command = ["run_rows.py", "runs", str(tmp_path / "sweep"), "--output", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    run_rows.main()
    once = file.read_bytes()
    run_rows.main()
    assert file.read_bytes() == once
    assert set(pd.read_csv(file)["run"]) == {"sweep/first"}
