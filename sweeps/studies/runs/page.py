"""runs.md from runs.csv.gz: python sweeps/studies/runs/page.py sweeps/results/h200/runs.csv.gz"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

TEXT = """# Sweeps on {machines}

In {faster} of {runs} runs stage x graph takes less time than stock vLLM (FASTER), in {slower} more
(SLOWER); in the other {open} the interval is too wide to say.

Every figure is a row of [{name}]({name}), made by `sweeps/studies/runs/compact.py` from the run
folders, this page by `sweeps/studies/runs/page.py`. `n` is the number of blocks, `ratio` the time a
window over that of off x off with its 95 % interval: below 1 is faster.

{sweeps}
## How to read the tables

- `tokens a window`: what vLLM was told to accept (synthetic acceptance), bonus token included;
  else what drafts really gained, over all requests, in off x off.
- Tables with `forward ms`: off x off's forward pass (CUDA events, one probed batch a cell). A cell:
  its forward pass and commit over that; microseconds of the host that our hooks add to a window
  (in brackets the part that decides what was accepted). Runs before these were recorded have none.
- `tokens`: exact: all tokens equal off x off's. Explained: they differ at ties of bf16 alone.
"""

SWEEP = """## {sweep}

    {command}

{origin}

{ratios}
{more}"""


def text_of(rows: pd.DataFrame, name: str) -> str:
    """The whole page; `name` is the CSV's."""
    rows = rows.assign(sweep=rows["run"].str.partition("/")[0])
    sweeps = [_sweep(str(sweep), part) for sweep, part in rows.groupby("sweep", sort=False)]
    verdicts = list(rows.loc[rows["cell"] == "stage x graph", "verdict"])
    faster, slower = verdicts.count("FASTER"), verdicts.count("SLOWER")
    return TEXT.format(
        machines=", ".join(f"one {gpu}" for gpu in rows["gpu"].unique()),
        faster=faster,
        slower=slower,
        open=len(verdicts) - faster - slower,
        runs=len(verdicts),
        name=name,
        sweeps="\n".join(sweeps),
    )


def _sweep(sweep: str, rows: pd.DataFrame) -> str:
    commands = list(dict.fromkeys(rows["command"].dropna()))
    details = [_device(rows), _checks(rows)]
    return SWEEP.format(
        sweep=sweep,
        command="\n    ".join(commands),
        origin=_origin(rows),
        ratios=_markdown(_ratios(rows)),
        more="".join(f"\n{table}\n" for table in details if table),
    )


def _origin(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    commit = f"commit {first['commit']}" if pd.notna(first["commit"]) else "commit not recorded"
    versions = ", ".join(f"{name} {first[name]}" for name in ("vllm", "torch", "triton"))
    pairs = ", ".join(rows["pair"].unique())
    return (
        f"Pair {pairs}; {first['gpu']}, driver {first['driver']}, {versions}; {commit}; "
        f"{first['started_at'][:10]}."
    )


def _case(run: pd.DataFrame) -> dict[str, str]:
    """A run's scenario, requests, precision and tokens per window, by column."""
    first = run.iloc[0]
    told, gained = first["synthetic_length"], first["tokens_a_window"]
    return {
        "scenario": first["scenario"],
        "requests": str(first["requests"]),
        "dtype": first["dtype"],
        "cache": first["cache_dtype"],
        "tokens a window": f"{told:g}" if pd.notna(told) else f"{gained:.2f} (gained)",
    }


def _ratios(rows: pd.DataFrame) -> list[dict[str, str]]:
    lines = []
    for _, run in rows.groupby("run", sort=False):
        line = _case(run) | {"n": str(run.iloc[0]["n"])}
        for row in run.to_dict("records"):
            line[row["cell"]] = _ratio(row)
        lines.append(line)
    return lines


def _ratio(row: dict[str, Any]) -> str:
    if row["verdict"] == "reference":
        return f"{row['window_ms']:.2f} ms a window"
    if pd.isna(row["ratio"]):
        return str(row["verdict"])
    if pd.isna(row["ratio_low"]):
        return f"{row['verdict']} {row['ratio']:.3f}"
    return f"{row['verdict']} {row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"


def _device(rows: pd.DataFrame) -> str:
    """Forward and commit over stock's forward, and the host's time; '' where not recorded."""
    if rows["hooks_ms"].isna().all():
        return ""
    lines = []
    for _, run in rows.groupby("run", sort=False):
        stock = run.loc[run["verdict"] == "reference", "forward_ms"].iloc[0]
        line = _case(run) | {"forward ms": _number(stock, 3)}
        for row in run.to_dict("records"):
            commit = 0.0 if pd.isna(row["commit_ms"]) else row["commit_ms"]
            over = (
                ""
                if row["verdict"] == "reference"
                else f"{(row['forward_ms'] + commit) / stock:.2f}; "
            )
            line[row["cell"]] = over + _hooks(row)
        lines.append({name: text for name, text in line.items() if name != "dtype"})
    return _markdown(lines)


def _hooks(row: dict[str, Any]) -> str:
    """Microseconds of the hooks, and in brackets of deciding."""
    deciding = _number(1e3 * row["deciding_ms"], 0)
    return _number(1e3 * row["hooks_ms"], 0) + (f" ({deciding})" if deciding else "")


def _checks(rows: pd.DataFrame) -> str:
    """Acceptance and tokens, where drafts are really verified."""
    real = rows[rows["synthetic_length"].isna()]
    lines = [
        {
            "scenario": row["scenario"],
            "cell": row["cell"],
            "drafts": f"{row['draft_tokens_total']:,}",
            "accepted": f"{row['accepted_tokens']:,}",
            "tokens a window": f"{row['tokens_a_window']:.2f}",
            "staged": f"{row['staged']:,}",
            "committed": f"{row['committed']:,}",
            "tokens": row["parity"],
            "first mismatch": "" if pd.isna(row["first_mismatch"]) else row["first_mismatch"],
        }
        for row in real.to_dict("records")
    ]
    told = [name for name in (lines[0] if lines else ()) if any(line[name] for line in lines)]
    return _markdown([{name: line[name] for name in told} for line in lines]) if lines else ""


def _number(value: float, digits: int) -> str:
    return "" if pd.isna(value) else f"{value:.{digits}f}"


def _markdown(lines: list[dict[str, str]]) -> str:
    """A table without padding: a wide one is mostly that."""
    frame = pd.DataFrame(lines).fillna("")
    header = [" | ".join(frame.columns), "|".join([" --- "] * len(frame.columns)).strip()]
    return "\n".join(f"| {row} |" for row in [*header, *map(" | ".join, frame.to_numpy())])


def main() -> None:
    """Write the page beside the CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    table = parser.parse_args().table
    text = text_of(pd.read_csv(table), table.name)
    (table.parent / "runs.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
