"""README.md from injection.csv: python sweeps/studies/precision/page.py"""

from pathlib import Path
from typing import Any

import pandas as pd

TEXT = """# Does the bench find a known delay?

{answer}

A wait is planted in every window of one cell, and its true share of the window is measured with it.
Every run is a row of [injection.csv](injection.csv); `measure.py` made them, `page.py` this page.

{table}

- `A/A half-width`: that of off x off against itself in the same runs.
- The deep shape has three times the 3B shape's layers ([deep-3b-shape.toml](deep-3b-shape.toml)),
  so that the GPU sets the pace. With 28 layers a busy host set it and hid what the GPU waited.
- `measure_aa.py` runs off x off against itself 40 times and counts the differences that it calls.

## Commands

{all_series}
"""


def text_of(rows: pd.DataFrame) -> str:
    """The whole page."""
    found = [_line(keys, part) for keys, part in rows.groupby(["series", "delay"], sort=False)]
    all_series = rows.dropna(subset="command").to_dict("records")
    return TEXT.format(
        answer=_answer(rows),
        table=pd.DataFrame(found).to_markdown(index=False, disable_numparse=True),
        all_series="\n".join(_told(row) for row in all_series).rstrip(),
    )


def _answer(rows: pd.DataFrame) -> str:
    """Number of delays found, host-bound runs left out."""
    lines = []
    for where, chosen in (
        ("On a CPU", rows[rows["series"] == "CPU"]),
        ("On an H200", rows[rows["series"].str.startswith("H200, GPU")]),
    ):
        told = [
            f"{100 * delay:g} % in {(part['verdict'] == 'SLOWER').sum()} of {len(part)} runs"
            for delay, part in chosen.groupby("delay")
        ]
        held = f"{chosen['holds'].sum()} of {len(chosen)} intervals hold the true ratio"
        lines.append(f"{where} it calls a delay SLOWER: {', '.join(told)}. {held}.")
    return "\n".join(lines)


def _line(keys: tuple[Any, ...], rows: pd.DataFrame) -> dict[str, str]:
    """One series and delay."""
    half = (rows["ratio_high"] - rows["ratio_low"]) / 2
    return {
        "series": str(keys[0]),
        "pair": rows.iloc[0]["pair"],
        "delay": f"{100 * keys[1]:g} %",
        "runs": str(len(rows)),
        "SLOWER": str((rows["verdict"] == "SLOWER").sum()),
        "truth held": str(rows["holds"].sum()),
        "blocks": _span(rows["n"], "{:,.0f}"),
        "half-width": _span(100 * half, "{:.2f}") + " %",
        "A/A half-width": _span(100 * rows["aa_half_width"], "{:.2f}") + " %",
    }


def _span(values: "pd.Series[float]", shown: str) -> str:
    low, high = shown.format(values.min()), shown.format(values.max())
    return low if low == high else f"{low} to {high}"


def _told(row: dict[str, Any]) -> str:
    commit = f"commit {row['commit']}" if pd.notna(row["commit"]) else "commit not recorded"
    said = f"{row['series']}: {row['machine']}; vLLM {row['vllm']}, {commit}."
    return f"{said}\n\n    {row['command']}\n"


if __name__ == "__main__":
    table = Path(__file__).with_name("injection.csv")
    table.with_name("README.md").write_text(text_of(pd.read_csv(table)), encoding="utf-8")
