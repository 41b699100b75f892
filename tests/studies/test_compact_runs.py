"""Run folders become rows: figures of run.json, times of report.md, the gate's mismatch."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from nwor_bench.report.text import NOT_MEASURED

KEPT = Path(__file__).resolve().parents[2] / "sweeps" / "results" / "cpu-2-cores"

REPORT = """
| Cell             |   Window ms |   Forward |   Sample |   Mask |   Commit |   Probe |
|:-----------------|------------:|----------:|---------:|-------:|---------:|--------:|
| off x off        |       9.311 |     6.231 |    0.497 |      DASH |        DASH |   0.948 |
| stage x graph    |       8.814 |     6.185 |    0.486 |      DASH |    0.017 |   1.308 |

| Cell             |   Hooks ms |   Deciding ms |   Share of window |
|:-----------------|-----------:|--------------:|------------------:|
| stage x graph    |      0.081 |         0.045 |             0.5 % |
""".replace("DASH", NOT_MEASURED)


@pytest.fixture
def compact(study: Callable[[str, str], ModuleType]) -> ModuleType:
    """The script that reads run folders."""
    return study("runs", "compact")


def test_a_row_a_cell_with_the_figures_of_the_run(compact: ModuleType) -> None:
    rows = compact.compact([KEPT])
    cells = json.loads((KEPT / "run.json").read_text())["cells"]
    assert len(rows) == len(cells)
    assert list(rows["n"]) == [cell["batches"] for cell in cells]
    assert list(rows["verdict"]) == [cell["verdict"] for cell in cells]
    stage = rows.set_index("cell").loc["stage x graph"]
    kept = next(c for c in cells if (c["nwor_mode"], c["scv_mode"]) == ("stage", "graph"))
    assert stage["ratio"] == kept["ratio_to_off"]
    assert (stage["ratio_low"], stage["ratio_high"]) == (
        kept["ratio_ci_low"],
        kept["ratio_ci_high"],
    )
    assert (stage["run"], stage["gpu"], stage["commit"]) == (KEPT.name, "none", "ef2d2b881bb1")
    assert "off x off (A/A)" in set(rows["cell"])
    assert [bool(command) for command in rows["command"]] == [True] + [False] * (len(rows) - 1)


def test_times_are_the_reports_and_a_dash_is_none(compact: ModuleType) -> None:
    assert compact.times_in(REPORT) == {
        "off x off": {"forward_ms": "6.231", "sample_ms": "0.497"},
        "stage x graph": {
            "forward_ms": "6.185",
            "sample_ms": "0.486",
            "commit_ms": "0.017",
            "hooks_ms": "0.081",
            "deciding_ms": "0.045",
        },
    }


def test_only_the_gates_mismatch_counts(compact: ModuleType, tmp_path: Path) -> None:
    shutil.copy(KEPT / "batches.csv", tmp_path)
    assert compact.mismatches_in(tmp_path / "batches.csv") == {}
    batches = pd.read_csv(tmp_path / "batches.csv")
    staging = (batches["nwor_mode"] == "stage") & (batches["scv_mode"] == "graph")
    batches["first_mismatch"] = staging.map({True: "4 of 8 differ", False: ""})
    batches.to_csv(tmp_path / "batches.csv", index=False)
    assert compact.mismatches_in(tmp_path / "batches.csv") == {"stage x graph": "4 of 8 differ"}
    assert compact.mismatches_in(tmp_path / "none.csv") == {}


def test_the_cache_dtype_and_the_synthetic_length_are_the_runs_own(
    compact: ModuleType, tmp_path: Path
) -> None:
    header = json.loads((KEPT / "run.json").read_text())
    header["spec"]["engine_args"] = {"kv_cache_dtype": "fp8"}
    header["pair"]["speculative"] = {"synthetic_acceptance_length": 2.6}
    header["spec"]["speculative_config"] = {"synthetic_acceptance_length": 1.4}
    (tmp_path / "run.json").write_text(json.dumps(header))
    row = next(compact.rows_of(tmp_path, "a run"))
    assert (row["cache_dtype"], row["synthetic_length"]) == ("fp8", 1.4)
    assert row["forward_ms"] == ""
