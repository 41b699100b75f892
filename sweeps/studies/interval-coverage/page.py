"""README.md from coverage.csv: python sweeps/studies/interval-coverage/page.py"""

from pathlib import Path

import pandas as pd

TEXT = """# How often do our intervals hold the truth?

Our 95 % interval holds the true ratio in {ours} % of simulated runs of 5 to 60 blocks with heavy
tails, drifting ones included; the percentile bootstrap over 5 blocks holds it in {percentile} %.
Stopping on a verdict excludes the truth in {verdict} % of runs, so we stop on the width.

    python sweeps/studies/interval-coverage/measure.py

{runs} simulated runs a line ({resampled} for the bootstraps) whose true ratio is 1; a share of 95 %
is uncertain by +- {beside:.1f}. `a sweep`: the machine drifts from batch to batch, and each block
runs its cells in random order. `neighbours 0.3`: neighbouring blocks are correlated by 0.3.

## Ways to make an interval

Per cent of runs whose interval holds the truth:

{intervals}

`ours` is Student's t on the blocks' log ratios, widened where they are autocorrelated
(`nwor_bench/analysis/statistics.py`). Where neighbouring blocks are correlated by 0.3 every way
falls short: ours holds the truth in {neighbours} % of runs, the percentile bootstrap in {worst} %.

## Stopping

At most 100 blocks. `blocks`: where a run ended on the width, on average. `half-width`: what it
sought, in spreads of a block. Per cent of runs whose interval held the truth at the stop, and at
every look on the way to it:

{stopping}

## The fastest of six equal cells

Per cent of runs in which the interval of the cell that came out fastest holds the truth:

{fastest}
"""


def write_page(table: Path) -> None:
    """README.md beside the CSV."""
    table.with_name("README.md").write_text(text_of(pd.read_csv(table)), encoding="utf-8")


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    by_question = dict(tuple(rows.groupby("question")))
    made = by_question["intervals"]
    heavy = made["noise"].str.endswith("tails") | made["noise"].str.contains("drift")
    correlated = made["noise"].str.startswith("neighbours")
    own, percentile = made["way"] == "ours", made["way"] == "percentile"
    stopped = by_question["stopping"]
    runs = int(made["runs"].max())
    return TEXT.format(
        ours=_span(made[heavy & ~correlated & own]["held"]),
        percentile=_span(made[heavy & ~correlated & percentile & (made["blocks"] == 5)]["held"]),
        verdict=_span(1 - stopped[stopped["way"] == "on a verdict"]["held"]),
        neighbours=_span(made[correlated & own]["held"]),
        worst=_span(made[correlated & percentile]["held"]),
        runs=f"{runs:,}",
        resampled=f"{int(made['runs'].min()):,}",
        beside=100 * 2 * (0.05 * 0.95 / runs) ** 0.5,
        intervals=_table(made, ["noise", "blocks"]),
        stopping=_table(stopped.round({"blocks": 1}), ["noise", "half_width", "blocks"]),
        fastest=_table(by_question["fastest of six"], ["noise", "blocks"]),
    )


def _span(shares: "pd.Series[float]") -> str:
    """`95 to 97`, in per cent."""
    return f"{100 * shares.min():.0f} to {100 * shares.max():.0f}"


def _table(rows: pd.DataFrame, index: list[str]) -> str:
    """Per cent by way, a line a case, in the order of the rows."""
    shares = (100 * rows["held"]).map("{:.1f}".format)
    blocks = rows["blocks"].map("{:g}".format)
    wide = rows.assign(shown=shares, blocks=blocks).pivot_table(
        index=index, columns="way", values="shown", aggfunc="first", sort=False
    )
    frame = wide.reset_index().rename(columns={"half_width": "half-width"})
    return str(frame.astype(str).to_markdown(index=False, disable_numparse=True))


if __name__ == "__main__":
    write_page(Path(__file__).with_name("coverage.csv"))
