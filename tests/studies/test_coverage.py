"""The table of coverage: its rows are those that the script has, and some of them again."""

from collections.abc import Callable
from math import hypot
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

pytestmark = pytest.mark.slow

TABLE = (
    Path(__file__).resolve().parents[2]
    / "sweeps"
    / "studies"
    / "interval-coverage"
    / "coverage.csv"
)

Study = Callable[[str, str], ModuleType]


def test_every_row_is_in_the_table_and_runs(study: Study) -> None:
    measure = study("interval-coverage", "measure")
    rows = pd.read_csv(TABLE)
    cases = measure.cases()
    known = list(zip(rows["interval"], rows["condition"], strict=True))
    assert [(case.interval, case.condition) for case in cases] == known
    assert len(set(known)) == len(known)
    for case in cases:
        assert 0 <= measure.simulate(case, 1)["covered"] <= 1


@pytest.mark.parametrize(
    ("interval", "condition"),
    [
        ("sweep: ratio of whole batches", "a sweep that drifts, heavy tails; 10 blocks"),
        ("live: draft counts, all k", "50 groups and spans"),
        *(
            ("worth --engines: tokens/s over k = 0, all k", condition)
            for condition in (
                "k = 4 five times as noisy; 5 blocks", "blocks correlate by 0.7; 8 blocks",
                "engines 1 % apart; 8 blocks", "engines 5 % apart; 8 blocks",
            )
        ),
    ],
)  # fmt: skip
def test_other_runs_are_covered_as_often(study: Study, interval: str, condition: str) -> None:
    """With other seeds; three standard errors of the difference apart at most."""
    measure = study("interval-coverage", "measure")
    (case,) = (c for c in measure.cases() if (c.interval, c.condition) == (interval, condition))
    rows = pd.read_csv(TABLE).set_index(["interval", "condition"])
    expected = rows.loc[(interval, condition)]
    found = measure.simulate(case, 400, seed=1)
    allowed = 3 * hypot(found["error"], expected["error"])
    assert abs(found["covered"] - expected["covered"]) < allowed
    assert abs(found["false_verdicts"] - expected["false_verdicts"]) < allowed
