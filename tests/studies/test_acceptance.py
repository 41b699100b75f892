"""Is acceptance equal in off and stage: the interval, and the kept run's tables."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

KEPT_TABLE = Path(__file__).parents[2] / "sweeps/studies/acceptance/acceptance.csv"


@pytest.fixture
def measure(study: Callable[[str, str], ModuleType]) -> ModuleType:
    """The script that compares acceptance."""
    return study("acceptance", "measure")


def counts(windows: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks of so many windows with drafts accepted one after the other at those rates."""
    accepted = [rng.binomial(windows, rates[0])]
    for rate in rates[1:]:
        accepted.append(rng.binomial(accepted[-1], rate))
    return np.stack([windows, *accepted], axis=1)


def table(off: np.ndarray, stage: np.ndarray) -> pd.DataFrame:
    """Both cells' counts as acceptance.csv has them."""
    names = ["windows", *(f"accepted_{i}" for i in range(1, off.shape[1]))]
    parts = [
        pd.DataFrame(counted, columns=names).assign(cell=cell, block=range(len(counted)))
        for cell, counted in (("off x off", off), ("stage x graph", stage))
    ]
    return pd.concat(parts)


@pytest.mark.slow  # many simulated runs
def test_the_interval_includes_the_truth_if_blocks_differ_in_size(measure: ModuleType) -> None:
    """400 runs of 12 blocks with a true difference of 0.05 at the first position."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        windows = rng.integers(80, 220, 12)
        off = counts(windows, np.array([0.50, 0.6]), rng)
        stage = counts(windows, np.array([0.55, 0.6]), rng)
        first = measure.differences(table(off, stage)).loc[1]
        held += first.low <= 0.05 <= first.high
    assert 0.92 <= held / 400 <= 0.98


def test_cells_that_stage_must_agree(measure: ModuleType) -> None:
    rows = pd.read_csv(KEPT_TABLE)
    rows.loc[rows.cell == "stage x off", "accepted_1"] += 1
    with pytest.raises(ValueError, match="compare them first"):
        measure.differences(rows)


def write_run(folder: Path, rows: pd.DataFrame) -> None:
    """A run folder with what `measure.py` reads: the kept run's blocks as batches."""
    per_position = rows[[f"accepted_{i}" for i in range(1, 5)]].astype(str).agg(";".join, axis=1)
    modes = rows["cell"].str.split(" x ", expand=True)
    batches = pd.DataFrame(
        {
            "nwor_mode": modes[0], "scv_mode": modes[1], "phase": "timed", "block": rows["block"],
            "requests": rows["requests"], "vllm_num_drafts": rows["windows"],
            "vllm_accepted_per_position": per_position, "token_digests": [
                ";".join(["same"] * n + [cell] * (8 - n))
                for n, cell in zip(rows["same_text_as_off"], rows["cell"], strict=True)
            ],
        }
    )  # fmt: skip
    batches.to_csv(folder / "batches.csv", index=False)
    off = rows[rows["cell"] == "off x off"]
    blocks = [
        {"block": block, "prompt_ids": prompts.split(";")}
        for block, prompts in zip(off["block"], off["prompts"], strict=True)
    ]
    header = {"command": rows["command"].iloc[0], "blocks": blocks}
    (folder / "run.json").write_text(json.dumps(header))


@pytest.mark.slow
def test_a_run_that_accepts_less_in_stage_ends_with_1(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pd.read_csv(KEPT_TABLE)
    write_run(tmp_path, rows)
    arguments = ["measure.py", str(tmp_path), "--output", str(tmp_path / "made")]
    monkeypatch.setattr(sys, "argv", arguments)
    assert measure.main() == 0
    for name in ("acceptance.csv", "differences.csv"):
        made, kept = tmp_path / "made" / name, KEPT_TABLE.with_name(name)
        assert made.read_text() == kept.read_text()
    staging = rows["cell"].str.startswith("stage")
    positions = [f"accepted_{i}" for i in range(1, 5)]
    rows.loc[staging, positions] = rows.loc[staging, positions] // 2
    write_run(tmp_path, rows)
    assert measure.main() == 1
    assert (pd.read_csv(tmp_path / "made" / "differences.csv").high < 0).all()
