"""Every study's page is what its CSV gives: no number was typed."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
STUDIES = CHECKOUT / "sweeps" / "studies"
RUNS = CHECKOUT / "sweeps" / "results" / "h200" / "runs.csv.gz"
Study = Callable[[str, str], ModuleType]


def check(page: Path, made: str) -> None:
    assert page.read_text(encoding="utf-8") == made


@pytest.mark.parametrize(
    ("folder", "table"),
    [
        ("interval-coverage", "coverage.csv"),
        ("precision", "injection.csv"),
        ("recurrent-bytes", "states.csv"),
    ],
)
def test_a_page_of_one_table(study: Study, folder: str, table: str) -> None:
    rows = pd.read_csv(STUDIES / folder / table)
    check(STUDIES / folder / "README.md", study(folder, "page").text_of(rows))


def test_the_page_of_interleaved_coverage(study: Study) -> None:
    folder = STUDIES / "interleaved-coverage"
    tables = [pd.read_csv(folder / name) for name in ("coverage.csv.gz", "stopping.csv")]
    check(folder / "README.md", study("interleaved-coverage", "page").text_of(*tables))


@pytest.mark.slow
def test_the_page_of_windows_in_turn(study: Study) -> None:
    folder = STUDIES / "interleave"
    tables = [pd.read_csv(folder / name) for name in ("groups.csv.gz", "cells.csv", "planted.csv")]
    check(folder / "README.md", study("interleave", "page").text_of(*tables))


def test_what_other_pages_cite_of_windows_in_turn(study: Study) -> None:
    """The results' counts of settings, and the README's row of each 8k run: one a host."""
    cells = pd.read_csv(STUDIES / "interleave" / "cells.csv")
    writes = study("interleave", "effect_tables").with_writes(cells)
    pay = [1 - row.ratio_to_off for row in writes if row.ratio_ci_high < 1]
    cost = [row.ratio_to_off - 1 for row in writes if row.ratio_ci_low > 1]
    said = " ".join((CHECKOUT / "docs" / "results-h200.md").read_text(encoding="utf-8").split())
    assert (
        f"saves {100 * min(pay):.1f} to {100 * max(pay):.1f} % in {len(pay)} of {len(writes)} runs "
        f"and costs {100 * min(cost):.1f} to {100 * max(cost):.1f} % in {len(cost)}," in said
    )
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    long = cells[(cells.context == 8192) & (cells.cell == "stage x graph")]
    for _, row in long[long.ratio_ci_low.notna()].iterrows():
        ratio = f"{row.ratio_to_off:.3f} [{row.ratio_ci_low:.3f}, {row.ratio_ci_high:.3f}]"
        assert f"| {row.cache.replace('auto', 'bf16'):5} | {ratio} |" in readme


@pytest.mark.parametrize(
    ("folder", "table"), [("kernels", "kernels.csv.gz"), ("profiler-cross-check", "ncu.csv")]
)
def test_a_page_of_one_table_with_its_facts(study: Study, folder: str, table: str) -> None:
    made = study(folder, "page").text_of(STUDIES / folder / table)
    check(STUDIES / folder / "README.md", made)


def test_the_page_of_servers(study: Study) -> None:
    folder = STUDIES / "live-serving"
    tables = [pd.read_csv(folder / name) for name in ("serving.csv", "steps.csv")]
    check(folder / "README.md", study("live-serving", "page").text_of(*tables))


@pytest.mark.slow
def test_the_page_of_the_runs(study: Study) -> None:
    made = study("runs", "page").text_of(pd.read_csv(RUNS), RUNS.name)
    check(RUNS.with_name("runs.md"), made)


def test_the_page_of_acceptance(study: Study) -> None:
    folder = STUDIES / "acceptance"
    made, _ = study("acceptance", "page").document(pd.read_csv(folder / "acceptance.csv"))
    check(folder / "README.md", made)


def test_the_page_of_the_hooks(study: Study) -> None:
    folder = STUDIES / "hook-cost"
    tables = (pd.read_csv(folder / name) for name in ("hook-parts.csv", "nvtx.csv"))
    check(folder / "README.md", study("hook-cost", "page").text_of(*tables))
