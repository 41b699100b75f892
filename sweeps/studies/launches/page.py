"""README.md from launches.csv: python sweeps/studies/launches/page.py"""

from pathlib import Path

import pandas as pd

TEXT = """# What does one launch take the host?

The commit's launch takes {direct:.1f} us by the driver directly, {compiled:.1f} by Triton's
`compiled[grid]` and {jit:.1f} by its `jit` call; replaying a CUDA graph of it takes {replay:.1f},
and {copied:.1f} with the copy of the counts before it.

    python sweeps/studies/launches/measure.py --output FILE.csv

{gpu}, {cpu}; Python {python}, torch {torch}, Triton {triton}.
Median microseconds of host time of one launch in a loop, over {launches:,} launches
([launches.csv](launches.csv)):

{table}
"""


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    table = rows.pivot_table(index="way", columns="kernel", values="median_us", sort=False)
    commit, facts = table["commit"], rows.iloc[0]
    return TEXT.format(
        direct=commit["direct"],
        compiled=commit["compiled"],
        jit=commit["jit"],
        replay=commit["replay"],
        copied=commit["copy and replay"],
        **{name: facts[name] for name in ("gpu", "cpu", "python", "torch", "triton", "launches")},
        table=table.reset_index().to_markdown(index=False, floatfmt=".2f"),
    )


if __name__ == "__main__":
    table = Path(__file__).with_name("launches.csv")
    table.with_name("README.md").write_text(text_of(pd.read_csv(table)), encoding="utf-8")
