"""README.md from coverage.csv.gz: python sweeps/studies/interleaved-coverage/page.py"""

from pathlib import Path

import pandas as pd

TEXT = """# How often does the interval from neighbouring windows hold the truth?

With 50 groups or more our 95 % interval holds the true effect in {ours} % of simulated runs,
whatever the clock does and however heavy the tails are. Where the groups themselves correlate it
holds it in {correlated} %, an interval that takes them for independent in {independent} %. The
plain mean covers too, with intervals up to {wider:.0f} times as wide.

It falls short where batches of 20 groups have effects of their own, {batches} % from 50 to 1,000
groups: 50 groups are 3 batches then. So do all intervals below.

    python sweeps/studies/interleaved-coverage/measure.py

{runs} simulated runs a line, of windows that scatter by 1 % (`simulated_groups.py`): two cells take
turns A B B A or B A A B, in runs of 2, 4 and 8 windows (85, 10 and 5 % of the groups; a real
batch now has 2 and 4 equally often). The true effect is 0, +0.3 % and -3 %. A share of 95 % is
uncertain by +- {beside:.1f}.

## Coverage

Per cent of runs whose interval holds the truth, the lowest and highest of the three effects:

{coverage}

`ours`: Huber's location, its variance by cosines (`nwor_bench/instruments/robust.py`).
`mean`: the plain mean, its variance likewise. The others locate as ours does, with the variance by
Newey and West, by a first-order autoregression, and as if groups were independent.

## Half-widths

Per cent, the median run, true effect 0. `ours` is the price of covering where groups correlate:
{price:.0f} % more than `independent` at 50 groups without correlation, {price_many:.0f} % at 1,000.

{widths}

## When `nwor-bench live` ends

    python sweeps/studies/interleaved-coverage/stopping.py

`live` ends on the interval's width. To end at the first look that is narrow, from 50 groups on,
held the truth in {before} % of runs: a narrow interval is also a lucky one. Now it first looks
after 200 groups, and when the interval is narrow it takes as many groups again. That holds it in
{usual} % of runs of {settings} settings. It stays at {hard} % if batches of 20 groups have effects
of their own: the interval is as short there without any stopping (table above).

{stop_runs} runs a line, groups of eight windows as in a server. Per cent of runs whose interval
holds the truth, and groups of the median run. The width sought is that of the median run at so many
groups ([stopping.csv](stopping.csv)).

{stopping}
"""

HARD = "batches of 20 differ"

WAYS = ("ours", "mean", "Newey-West", "autoregression", "independent")


def write_page(coverage: Path, stopping: Path) -> None:
    """README.md beside the CSVs."""
    made = text_of(pd.read_csv(coverage), pd.read_csv(stopping))
    stopping.with_name("README.md").write_text(made, encoding="utf-8")


def text_of(rows: pd.DataFrame, ends: pd.DataFrame) -> str:
    """The whole page."""
    many = rows[rows["groups"] >= 50]
    ours, independent = many[many["way"] == "ours"], many[many["way"] == "independent"]
    correlated, apart = (
        ours["noise"].str.startswith(word).to_numpy() for word in ("groups", "batches")
    )
    runs = int(rows["runs"].min())
    none = rows[rows["effect"] == 0]
    wide = none.pivot_table(
        index=["noise", "groups"], columns="way", values="half_width", sort=False
    )
    price = 100 * (wide["ours"] / wide["independent"] - 1)
    now, before = (ends[ends["rule"] == rule] for rule in ("now", "before"))
    hard = now["noise"] == HARD
    return TEXT.format(
        before=_span(before["held"]),
        hard=_span(now[hard]["held"]),
        settings=now[~hard]["noise"].nunique(),
        usual=_span(now[~hard]["held"]),
        stop_runs=f"{ends['runs'].min():,}",
        stopping=_stopping_table(ends),
        ours=_span(ours[~correlated & ~apart]["held"]),
        correlated=_span(ours[correlated]["held"]),
        batches=_span(ours[apart]["held"]),
        independent=_span(independent[correlated]["held"]),
        wider=(wide["mean"] / wide["ours"]).max(),
        runs=f"{runs:,}",
        beside=100 * 2 * (0.05 * 0.95 / runs) ** 0.5,
        coverage=_table(rows),
        price=price["independent", 50],
        price_many=price["independent", 1000],
        widths=_markdown((100 * wide[list(WAYS)]).map("{:.3f}".format).reset_index()),
    )


def _span(shares: "pd.Series[float]") -> str:
    """`94.1 to 96.0`, in per cent."""
    return f"{100 * shares.min():.1f} to {100 * shares.max():.1f}"


def _table(rows: pd.DataFrame) -> str:
    grouped = rows.groupby(["noise", "groups", "way"], sort=False)["held"]
    low, high = ((100 * held).map("{:.1f}".format) for held in (grouped.min(), grouped.max()))
    shown = (low + " to " + high).unstack("way", sort=False)[list(WAYS)].reset_index()
    return _markdown(shown)


def _stopping_table(ends: pd.DataFrame) -> str:
    wide = ends.pivot_table(
        index=["noise", "sought"], columns="rule", values=["held", "groups"], sort=False
    )
    shown = pd.DataFrame(
        {
            f"{rule}, {what}": (factor * wide[what, rule]).map(form.format)
            for rule in ("before", "now")
            for what, factor, form in (("held", 100, "{:.1f}"), ("groups", 1, "{:,.0f}"))
        }
    )
    return _markdown(shown.reset_index())


def _markdown(frame: pd.DataFrame) -> str:
    aligned = ["left", *["right"] * (frame.shape[1] - 1)]
    text = frame.astype(str).to_markdown(index=False, disable_numparse=True, colalign=aligned)
    return str(text)


if __name__ == "__main__":
    write_page(*(Path(__file__).with_name(name) for name in ("coverage.csv.gz", "stopping.csv")))
