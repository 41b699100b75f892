"""`sweep --against` on real vLLM: three engines in their own processes, one of them different."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from engine_tools import tiny_spec

from nwor_bench.errors import ExitCode
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("figures_left_out", "environment_given_back"),
]


def sweep(folder: Path, against: dict[str, Any]) -> tuple[ExitCode, pd.DataFrame, dict[str, Any]]:
    """A sweep of the tiny pair against these arguments; its exit code, cells and run.json."""
    spec = tiny_spec(
        against=json.dumps(against), requests=2, batches=3, warmup=1, max_warmup=1,
        block_size=None, max_new_tokens=24,
    )  # fmt: skip
    code = run_one(spec, PairChoice(pair="tiny"), RunOptions(output=folder))
    cells = pd.read_csv(folder / "cells.csv", keep_default_na=False).set_index("arm")
    return code, cells, json.loads((folder / "run.json").read_text())


@pytest.mark.long
def test_an_engine_with_other_blocks_says_the_same_and_is_timed(tmp_path: Path) -> None:
    code, cells, run = sweep(tmp_path / "run", {"block_size": 32})
    assert code is ExitCode.OK
    assert dict(cells.parity) == {"": "reference", "A/A": "exact", "block_size=32": "exact"}
    assert set(cells.batches) == {3}
    assert (cells.loc[["A/A", "block_size=32"]].ratio_to_off != "").all()
    assert len(set(cells.accepted_tokens)) == 1
    engine = run["engine"]
    assert engine["start_count"] == 3
    assert set(engine["arms"]) == {"A/A", "block_size=32"}
    assert engine["arms"]["block_size=32"]["block_size"] == 32 != engine["block_size"]
    assert "block_size" not in engine["arms"]["A/A"]
    batches = pd.read_csv(tmp_path / "run/batches.csv", keep_default_na=False)
    assert set(batches.groupby("block").arm.nunique()) == {3}


@pytest.mark.long
def test_an_engine_that_says_other_tokens_is_invalid(tmp_path: Path) -> None:
    """Planted: random weights instead of the model's."""
    code, cells, run = sweep(tmp_path / "run", {"load_format": "dummy"})
    assert code is ExitCode.CORRECTNESS_BROKEN
    arm = 'load_format="dummy"'
    assert dict(cells.parity) == {"": "reference", "A/A": "exact", arm: "INVALID"}
    assert cells.loc[arm].verdict == "INVALID"
    assert cells.loc[arm].ratio_to_off == cells.loc[arm].window_ms_mean == ""
    assert set(run["parity"]["broken"]) == {f"off x off ({arm})"}
    report = (tmp_path / "run/report.md").read_text()
    assert "cannot be trusted" not in report


def test_an_engine_that_drafts_otherwise_is_timed_and_its_acceptance_compared(
    tmp_path: Path,
) -> None:
    """Prompt lookup beside a draft model: other drafts, and the same tokens."""
    code, cells, run = sweep(tmp_path / "run", {"speculative_config": {"method": "ngram"}})
    assert code is ExitCode.OK
    arm = 'speculative_config={"method": "ngram"}'
    assert dict(cells.parity) == {"": "reference", "A/A": "exact", arm: "exact"}
    assert run["pair"]["arms"][arm]["draft"] is None
    assert cells.loc[arm].accepted_tokens != cells.loc[""].accepted_tokens
    assert cells.loc[arm].verdict != "INVALID"
    report = (tmp_path / "run/report.md").read_text()
    assert "percentage points over off x off's: draft 1" in report
