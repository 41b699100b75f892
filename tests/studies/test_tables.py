"""Pages have the numbers of their CSV files, and the scripts beside them still start."""

import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tables

from nwor_bench.models.measured import measured_rows, outcomes

CHECKOUT = Path(__file__).resolve().parents[2]
STUDIES = CHECKOUT / "sweeps" / "studies"

PAGES = list(tables.pages())
SCRIPTS = sorted(path for path in STUDIES.rglob("*.py") if "ArgumentParser" in path.read_text())


def words_of(name: str) -> str:
    """A page on one line."""
    return " ".join((CHECKOUT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_no_number_of_a_page_was_typed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tables.filled(page) == text
    assert not [line for line in text.splitlines() if tables.VALUE.match(line)]


def test_what_the_results_cite_of_interleaved_windows() -> None:
    known = tables.values(STUDIES / "interleave" / "README.md")
    results = words_of("docs/results-h200.md")
    assert (
        f"saves {known['gains']} % in {known['pay']} of {known['splits']} runs "
        f"and costs {known['costs']} % in {known['cost']}," in results
    )


SETTING = ["pair", "gpu", "requests", "context", "cache"]
SETTING_OF_HYBRIDS = ["pair", "gpu", "weights", "requests", "drafts"]


def test_what_readme_and_results_cite_of_recurrent_states() -> None:
    known = tables.values(STUDIES / "states" / "README.md")
    results = words_of("docs/results-h200.md")
    at_once = f"{known['own_at_once']} requests in the cache in which stock ran "
    at_once += f"{known['stock_at_once']}, at {known['one_slot']} times its tokens/s"
    assert results.count(at_once) == 2
    steps = ", ".join(known[name] for name in ("one", "eight", "many"))
    assert f"take {steps} and {known['most']} of stock's time" in results
    assert f"fp8 {known['fp_many']} at 32 and {known['fp_most']} at 80" in results
    assert f"Qwen3-Next-80B in fp8 {known['next']} at 8 and 32" in results
    assert f"takes {known['control']} of stock's time" in results
    states = words_of("docs/states.md")
    assert f"[{known['own_both']}](../sweeps/studies/states/" in states
    fused = f"half of the commit, {known['half_of_step']} % of a step where that is most "
    assert f"{fused}(the prototypes {known['saved_of_step']} %)" in states


def of_whole_hybrids() -> pd.DataFrame:
    """Cells of models with recurrent states and all of their layers, with stock's time: of the last
    run of each setting."""
    cells = pd.read_csv(STUDIES / "states" / "windows.csv")
    last = cells.drop_duplicates(SETTING_OF_HYBRIDS, keep="last")[[*SETTING_OF_HYBRIDS, "revision"]]
    cells = cells.merge(last, on=[*SETTING_OF_HYBRIDS, "revision"])
    cells = cells[~cells.pair.str.contains("quarter") & cells.against.isna()].fillna(
        {"weights": ""}
    )
    stock = cells[cells.cell == "off x off"].assign(stock=cells.device_ms.map("{:.2f}".format))
    stock = stock[[*SETTING_OF_HYBRIDS, "stock"]]
    cells = cells.merge(stock, on=SETTING_OF_HYBRIDS, validate="many_to_one")
    return cells.assign(cache="auto")


def test_all_rows_are_those_of_the_studies_and_the_readmes_are_some_of_them() -> None:
    """Each ratio with its batch, cache, stock's time and tokens/s; every row of the newer study is
    there. The README has a loss too."""
    older = pd.read_csv(STUDIES / "interleave" / "cells.csv").assign(stock="")
    newer = pd.read_csv(STUDIES / "two-clocks" / "cells.csv")
    newer = newer[~newer.gpu.str.contains("H100")]
    stock = newer[newer.cell == "off x off"].assign(stock=newer.step_ms.map("{:.2f}".format))
    newer = newer.merge(stock[[*SETTING, "stock"]], on=SETTING, validate="many_to_one")
    known = {}
    for cells in (older, newer, whole := of_whole_hybrids()):
        staged = cells[cells.cell.str.startswith("stage x") & cells.ratio_ci_low.notna()]
        for _, row in staged.iterrows():
            ratio = f"{row.ratio_to_off:.3f} [{row.ratio_ci_low:.3f}, {row.ratio_ci_high:.3f}]"
            cache = row.cache.replace("auto", "bf16")
            more = f"{100 * (1 / row.ratio_to_off - 1):+.1f} %"
            known[str(row.requests), cache, row.stock, ratio, more] = row.verdict
    results = (CHECKOUT / "docs" / "results-h200.md").read_text(encoding="utf-8")
    pattern = r"\| +(\d+) \| (\w+) +\| *([\d.]*) +\| (\d\.\d{3} \[[\d., ]+\]) \| +(\S+ %) \|"
    rows = re.findall(pattern, results)
    assert not set(rows) - known.keys()
    assert len(rows) == len(set(rows))
    told = pd.concat([newer, whole])
    assert len(set(rows)) >= told[told.cell.str.startswith("stage x")].ratio_to_off.count()
    settings = measured_rows()  # those that a run on a CPU counts
    ratios = {
        f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]"
        for row in settings
        if row.ratio and "quarter" not in row.pair
    }
    assert ratios <= {row[3] for row in rows}
    assert f"the last run of each setting: {outcomes(settings)}" in " ".join(results.split())
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    few = re.findall(r"\| +(\d+) \| (\d\.\d{3} \[[\d., ]+\]) +\| +(\S+ %) +\|", readme)
    verdicts = {(row[0], *row[3:]): known[row] for row in rows}
    assert [verdicts[row] for row in few] == ["FASTER", "FASTER", "AMBIGUOUS", "SLOWER"]


def test_the_readmes_servers_and_compiled_window_are_those_of_the_studies() -> None:
    servers = tables.values(STUDIES / "live-serving" / "README.md")
    compiled = tables.values(STUDIES / "versions" / "README.md")
    readme = words_of("README.md")
    ratio, low, high = map(float, re.findall(r"[\d.]+", compiled["compiled_step"]))
    assert f"[{ratio:.3f} [{low:.3f}, {high:.3f}]](sweeps/studies/versions/" in readme
    assert f"and {compiled['compiled64_step']} at 64." in readme
    assert f"{servers['server_64']} and {servers['server_256']} of stock's tokens/s" in readme
    assert f"gives {servers['server_rings']} of stock's tokens/s with 32 in flight" in readme
    states = tables.values(STUDIES / "states" / "README.md")
    rings = f"{states['rings_stock']} of stock's time at 32 requests and {states['stock_80']} at 80"
    assert f"a window takes {rings}" in readme
    results = words_of("docs/results-h200.md")
    assert f"a window in fp8 takes {rings}" in results
    assert f"gives {servers['server_rings']} times stock's tokens/s" in results
    page = words_of("docs/states.md")
    longer = rings.replace("of stock's time", "times as long as stock's")
    assert f"(fp8, H200) {longer}" in page
    moved = f"moves {states['ring_moved']} GB of states a step at 32, `plan` says "
    assert f"{moved}{states['ring_moved_said']}." in page
    assert f"gave {servers['server_rings']} times stock's tokens/s, with rings" in page


def test_the_readmes_speculation_is_the_studys() -> None:
    known, readme = tables.values(STUDIES / "methods" / "README.md"), words_of("README.md")
    assert f"takes {known['tax']} times plain decoding's time at 64 requests" in readme
    assert f"up to {known['worst']} times as long" in readme
    assert f"FlashAttention 3 {known['fa3'].split()[-1]}." in readme
    assert known["four"] < known["best"]
    at = f"takes {known['tax1']} times at 1 request, {known['tax8']} at 8 and {known['tax']} at 64"
    assert at in words_of("docs/arms.md")


def test_the_results_times_in_a_server_are_those_of_the_study() -> None:
    """Medians over blocks of the time per token over stock's, with their intervals."""
    blocks = pd.read_csv(STUDIES / "live-serving" / "paired.csv")
    blocks = blocks[blocks.kind == "time per token"]
    times = blocks.set_index(["rate", "block", "mode"]).ms.unstack()
    told = {}
    for mode in ("stage", "interleave"):
        for rate, own in (times[mode] / times.stock).dropna().groupby("rate"):
            names = ("median", "median_low", "median_high")
            middle, low, high = (tables.AGGREGATES[name](list(own)) for name in names)
            told[mode, rate] = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
    results = words_of("docs/results-h200.md")
    half, full = sorted({rate for _, rate in told})
    assert f"time per token {told['stage', half]} of stock's at half load and " in results
    assert f"{told['stage', full]} near capacity; interleaved " in results
    assert f"{told['interleave', half]} and {told['interleave', full]}" in results
    assert f"time per token is {told['stage', half]} times stock's at half load" in results


@pytest.mark.slow  # imports vLLM
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_script_still_imports(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert "usage" in capsys.readouterr().out


PAGE = """# Which is fastest?

There are <!--few-->7<!--/--> of them, <!--middle--><!--/--> ms.

<!-- table times -->
old
<!-- end -->

<!-- table by_cell -->
<!-- end -->
"""

STATEMENTS = """-- view fast
SELECT * FROM some_runs WHERE ms < 3;

-- values
SELECT count(*) AS few, fmt('{:.1f}', median(ms)) AS middle FROM fast;

-- table times
SELECT cell, fmt('{:+.2f} ms', ms) AS time
FROM some_runs ORDER BY ms;

-- pivot by_cell
SELECT requests, cell, ms FROM some_runs;
"""

FILLED = """# Which is fastest?

There are <!--few-->2<!--/--> of them, <!--middle-->1.8<!--/--> ms.

<!-- table times -->

| cell | time |
| --- | --- |
| off |  |
| off | +1.50 ms |
| stage | +2.00 ms |

<!-- end -->

<!-- table by_cell -->

| requests | off | stage |
| --- | --- | --- |
| 8 | 1.5 | 2.0 |
| 64 |  |  |

<!-- end -->
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "some-runs.csv").write_text(
        "# command: a line of facts\nrequests,cell,ms\n8,off,1.5\n8,stage,2.0\n64,off,\n"
    )
    page = tmp_path / "README.md"
    page.write_text(PAGE)
    page.with_suffix(".sql").write_text(STATEMENTS)
    return page


def values_of(page: Path, query: str) -> dict[str, object]:
    """The values of one statement."""
    page.with_suffix(".sql").write_text(f"-- values\n{query};\n")
    return tables.values(page)


def test_tables_values_and_pivots_are_filled(page: Path) -> None:
    assert tables.filled(page) == FILLED
    page.write_text(FILLED)
    assert tables.filled(page) == FILLED
    assert tables.values(page) == {"few": 2, "middle": "1.8"}


def test_a_value_without_a_definition_is_refused(page: Path) -> None:
    for text in ("about <!--many-->3<!--/-->", "<!-- table many -->\n<!-- end -->"):
        page.write_text(PAGE + text)
        with pytest.raises(KeyError, match="many"):
            tables.filled(page)


def test_a_table_without_a_place_is_refused(page: Path) -> None:
    page.write_text(PAGE.replace("table by_cell", "by_cell"))
    with pytest.raises(KeyError, match="no <!-- table by_cell -->"):
        tables.filled(page)


def test_aggregates_of_statements(page: Path) -> None:
    """The sign test's interval of a median: the 2nd and the 9th of 10 values, as fewer than 2 of 10
    heads have a chance of 1.1 %. A rank correlation leaves out rows without a value. Groups are
    located as reports locate them."""
    page.with_name("ten.csv").write_text("x\n" + "\n".join(str(i * i) for i in range(1, 11)))
    query = "SELECT median_low(x) AS low, median_high(x) AS high FROM ten"
    assert values_of(page, query) == {"low": 4, "high": 81}
    page.with_name("two.csv").write_text("x,y\n1,1\n2,8\n3,27\n4,\n5,-1\n")
    found = values_of(page, "SELECT rank_correlation(x, y) AS rho FROM two")
    assert found["rho"] == pytest.approx(1 - 6 * (1 + 1 + 1 + 9) / (4 * 15))
    rng = np.random.default_rng(3)
    ms = rng.normal(0.01, 0.002, 400)
    page.with_name("groups.csv").write_text("ms\n" + "\n".join(map(str, ms)))
    found = values_of(page, "SELECT effect(ms) AS middle, half_width(ms) AS half FROM groups")
    assert found["middle"] == pytest.approx(0.01, abs=0.0005)
    assert found["half"] == pytest.approx(1.96 * 0.002 / 20, rel=0.25)
