"""Write docs/planted-faults.md from what the planted-fault tests recorded.

    NWOR_BENCH_PLANTED_JSON=sweeps/studies/planted-faults make test ARGS="-k planted"
    python sweeps/studies/planted-faults/planted_table.py

The tests write COLUMN.json, and faults.csv: each fault, what it stands for, and why the checks see
it.
"""

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd

RESULTS = Path(__file__).resolve().parent
PAGE = RESULTS.parents[2] / "docs" / "planted-faults.md"
SOUND = "none (sound run)"
"""The control row, as the tests record it."""

COLUMNS = {
    "cpu": "CPU, tiny pair",
    "h200-real-eager": "H200, real weights, eager",
    "h200-real-full": "H200, real weights, full graphs",
    "h200-shape-eager": "H200, 3B shape, eager",
    "h200-shape-full": "H200, 3B shape, full graphs",
}
INTRODUCTION = """\
# Planted faults

Each row is a fault that was planted into the project's own code. The sweep's gate then ran on a
real engine, and the cell says which of its checks saw the fault. No fault may pass; an empty cell
was not run, or the fault cannot be there. Real weights: SmolLM2 with an EAGLE drafter, in bf16.
"""
CHECKS = """\
The checks: **tokens** are compared with those of off x off, **acceptance** with its accepted
drafts by position, **K/V** with the rows that mode off leaves in the cache. **Writes**: the slots
of staged rows are filled with a constant when a window opens; before the commit nothing else may
stand there, after it as many drafts as were counted, in every layer alike. **Counters**: staged,
committed and rejected tokens add up and equal vLLM's own. **Ranks** must have recorded the same
windows. Where tokens differ on the CPU, acceptance is not looked at any more.

Timed batches are not watched for writes: a rejected draft that is written there and overwritten
by the next window changes no answer, row or count.

Faults at a switch show in interleaved batches only, and the gate's interleaved batch finds them. A
first fault of one row, on an H200, was within tolerance. The comparison is fine enough: a row of
ones in layer 0 is 1.8 row norms off on the CPU, by a GPU's rule as well, where 8e-8 is allowed. The
likely cause is that the fault missed. vLLM's slot buffer holds the last window's slots until the
drafter runs, then those of the next window, which writes them before it reads them. The faults here
copy the slots at the commit.
"""


def read_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """By column what was recorded there; a column without a file is left out."""
    files = {name: folder / f"{name}.json" for name in COLUMNS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def read_faults(folder: Path) -> list[dict[str, str]]:
    """Every fault that the tests plant: `name`, `stands_for`, `why`."""
    with (folder / "faults.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_faults(folder: Path, faults: list[dict[str, str]]) -> None:
    """Replace the list; the tests call this."""
    pd.DataFrame(faults).to_csv(folder / "faults.csv", index=False)


def cell(fault: str, facts: dict[str, Any]) -> str:
    """Which checks saw a fault; empty where it was not planted.

    A fault whose verdict was recomputed from the measured errors is marked.
    """
    found = facts.get("faults", {})
    if fault not in found:
        return ""
    if fault in facts.get("rejudged", {}):
        return f"{', '.join(facts['rejudged'][fault]['checks'])} (checked again)"
    if fault == SOUND:
        return "passes" if not found[fault] else f"FALSE ALARM: {', '.join(found[fault])}"
    return ", ".join(found[fault]) or "NOT CAUGHT"


def render(outcomes: dict[str, dict[str, Any]]) -> str:
    """The page in Markdown."""
    faults = read_faults(RESULTS)
    control = {"name": SOUND, "stands_for": "the control: three sets of prompts"}
    rows = [
        {"Fault": fault["name"], "What it stands for": fault["stands_for"]}
        | {title: cell(fault["name"], outcomes.get(c, {})) for c, title in COLUMNS.items()}
        for fault in (control, *faults)
    ]
    reasons = [{"Fault": f["name"], "Why these checks see it": f["why"]} for f in faults]
    origin = [
        f"- {COLUMNS[name]}: {facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}."
        for name, facts in outcomes.items()
    ]
    anew = [
        f"- TokenCheck anew in {COLUMNS[name]}: {fault}; {what['why']}."
        for name, facts in outcomes.items()
        for fault, what in facts.get("rejudged", {}).items()
    ]
    parts = [
        INTRODUCTION,
        pd.DataFrame(rows).to_markdown(index=False) + "\n",
        "\n".join([*origin, *anew]) + "\n",
        CHECKS,
        pd.DataFrame(reasons).to_markdown(index=False) + "\n",
        "Made by `sweeps/studies/planted-faults/planted_table.py` from the files beside it.\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(read_outcomes(RESULTS)))
