"""Is acceptance equal in off and stage: the interval, and the kept run's table."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.benchmarks import acceptance_table

KEPT = Path(__file__).parents[2] / "sweeps/results/h200/smollm2-eagle-short"


def counts(windows: np.ndarray, rates: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blocks of so many windows with drafts accepted one after the other at those rates."""
    accepted = [rng.binomial(windows, rates[0])]
    for rate in rates[1:]:
        accepted.append(rng.binomial(accepted[-1], rate))
    return np.stack([windows, *accepted], axis=1)


def test_with_equal_blocks_it_is_the_paired_t_interval() -> None:
    rng = np.random.default_rng()
    windows = np.full(9, 150)
    off, stage = (counts(windows, np.array([0.5, 0.6, 0.6]), rng) for _ in range(2))
    found = acceptance_table.differences(off, stage)
    assert [d.name for d in found] == [
        "acceptance length",
        *(f"draft {i} accepted" for i in (1, 2, 3)),
    ]
    rates = [values[:, 1:] / values[:, :1] for values in (off, stage)]
    for d, a, b in zip(found[1:], rates[0].T, rates[1].T, strict=True):
        exact = stats.ttest_rel(b, a).confidence_interval()
        assert (d.low, d.high) == pytest.approx((exact.low, exact.high))
        assert (d.off, d.stage) == pytest.approx((a.mean(), b.mean()))
    assert found[0].stage == pytest.approx(1 + rates[1].sum(axis=1).mean())


def test_the_interval_holds_the_truth_where_blocks_differ_in_size() -> None:
    """400 runs of 12 blocks with a true difference of 0.05 at the first position."""
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        windows = rng.integers(80, 220, 12)
        off = counts(windows, np.array([0.50, 0.6]), rng)
        stage = counts(windows, np.array([0.55, 0.6]), rng)
        first = acceptance_table.differences(off, stage)[1]
        held += first.low <= 0.05 <= first.high
    assert 0.92 <= held / 400 <= 0.98


def test_a_run_that_accepts_less_in_stage_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.json", "batches.csv"):
        shutil.copy(KEPT / name, tmp_path)
    monkeypatch.setattr(sys, "argv", ["acceptance_table.py", str(tmp_path)])
    assert acceptance_table.main() == 0
    assert "| NO " not in capsys.readouterr().out
    batches = pd.read_csv(tmp_path / "batches.csv")
    halved = batches.vllm_accepted_per_position.map(
        lambda text: ";".join(str(int(count) // 2) for count in text.split(";"))
    )
    batches.vllm_accepted_per_position = halved.where(
        batches.nwor_mode == "stage", batches.vllm_accepted_per_position
    )
    batches.to_csv(tmp_path / "batches.csv", index=False)
    assert acceptance_table.main() == 1
    assert capsys.readouterr().out.count("| NO ") == 5


def test_the_kept_table_is_that_of_the_kept_run() -> None:
    text, found = acceptance_table.document(KEPT)
    assert (KEPT / "acceptance.md").read_text() == text
    assert min(found[0].off, found[0].stage) >= 2.0
