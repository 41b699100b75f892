"""Is acceptance equal in off and stage: the interval, and the kept run's tables."""

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


def test_kept_differences_are_those_of_the_kept_counts(measure: ModuleType) -> None:
    rows = pd.read_csv(KEPT_TABLE)
    kept = pd.read_csv(KEPT_TABLE.with_name("differences.csv"))
    found = measure.differences(rows).reset_index()
    assert found[kept.columns].to_numpy() == pytest.approx(kept.to_numpy(), abs=1e-5)
    positions = [f"accepted_{i}" for i in range(1, 5)]
    staging = rows.cell.str.startswith("stage")
    rows.loc[staging, positions] //= 2
    assert (measure.differences(rows).high < 0).all()
    rows.loc[rows.cell == "stage x off", "accepted_1"] += 1
    with pytest.raises(ValueError, match="compare them first"):
        measure.differences(rows)
