"""README.md from ncu.csv: python sweeps/studies/profiler-cross-check/page.py"""

from pathlib import Path

import pandas as pd

from nwor_bench.records.types import SETTLING

WANTED = 0.03
"""Largest allowed difference of the two methods, a fraction."""

TEXT = """# Do Nsight's profilers agree with what is measured in the process?

{verdict}
Launches and waits by Nsight Systems agree with PyTorch's profiler: [nsys.md](nsys.md).

## Nsight Compute against PM sampling, window by window

    {profile}
    python sweeps/studies/profiler-cross-check/measure.py REPORT.windows.csv {run}
    python sweeps/studies/profiler-cross-check/page.py

{machine}; an eager engine, {requests} requests x
{drafts} drafts, off x off. Sampled: the run {run}, {batches} batches (the A/A arm's among them),
acceptance {acceptance}. Nsight Compute measured {measured} windows, in one pass.

{table}

Each window is compared with the mean of the sampled ones of its number in a batch; all of them
stand in [ncu.csv](ncu.csv). Here are those with at least {settling} windows of their batch before
them. MB are 10^6 bytes. L2 is sectors read and written x 32 for Nsight Compute, and all operations
(`lts__t_bytes`) for sampling.
"""


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each counter, over the windows that can be compared: those behind no prefill."""
    fair = rows[rows["window"] >= SETTLING]
    ratio = fair.groupby("counter", sort=False)["ncu / sampled"]
    means = fair.groupby("counter", sort=False)[["ncu MB", "sampled MB, mean"]].mean()
    spread = ratio.agg(windows="size", mean="mean", lowest="min", highest="max")
    return means.join(spread).reset_index()


def verdict(table: pd.DataFrame) -> str:
    """Verdict: whether DRAM bytes of comparable windows agree within WANTED."""
    dram = table[table["counter"].str.startswith("DRAM")]
    apart = (dram[["lowest", "highest"]] - 1).abs().max(axis=1)
    words = ", ".join(
        f"{name} {100 * off:.2f} %" for name, off in zip(dram["counter"], apart, strict=True)
    )
    within = "within" if (apart <= WANTED).all() else "NOT within"
    return (
        f"DRAM bytes by Nsight Compute and by sampling differ by at most {words}:\n{within} the "
        f"{100 * WANTED:.0f} % wanted."
    )


def text_of(table: Path) -> str:
    """The whole page."""
    told = [line for line in table.read_text(encoding="utf-8").splitlines() if line[:2] == "# "]
    facts = {name: value for name, _, value in (line[2:].partition(": ") for line in told)}
    found = summary(pd.read_csv(table, comment="#"))
    shown = found.to_markdown(index=False, floatfmt=("", ",.2f", ",.2f", "", *(".4f",) * 3))
    return TEXT.format(verdict=verdict(found), table=shown, settling=SETTLING, **facts)


if __name__ == "__main__":
    here = Path(__file__).parent
    (here / "README.md").write_text(text_of(here / "ncu.csv"), encoding="utf-8")
