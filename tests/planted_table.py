"""Write docs/planted-faults.md from what the planted-fault tests recorded.

Reads sweeps/results/planted-faults/COLUMN.json, written by those tests with
NWOR_BENCH_PLANTED_JSON=sweeps/results/planted-faults. Run it from the checkout:
PYTHONPATH=.:kernels .venv/bin/python tests/planted_table.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT / "tests" / "live_engine"))

from planted_faults import FAULTS, RANK_FAULTS  # noqa: E402
from planted_outcomes import SOUND  # noqa: E402

RESULTS = CHECKOUT / "sweeps" / "results" / "planted-faults"
PAGE = CHECKOUT / "docs" / "planted-faults.md"
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
"""


def read_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """By column what was recorded there; a column without a file is left out."""
    files = {name: folder / f"{name}.json" for name in COLUMNS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def cell(fault: str, facts: dict[str, Any]) -> str:
    """Which checks saw a fault; empty where it was not planted.

    A fault that was judged anew, from the errors that were measured, says so.
    """
    found = facts.get("faults", {})
    if fault not in found:
        return ""
    if fault in facts.get("rejudged", {}):
        return f"{', '.join(facts['rejudged'][fault]['checks'])} (judged anew)"
    if fault == SOUND:
        return "passes" if not found[fault] else f"FALSE ALARM: {', '.join(found[fault])}"
    return ", ".join(found[fault]) or "NOT CAUGHT"


def render(outcomes: dict[str, dict[str, Any]]) -> str:
    """The page in Markdown."""
    table = [(SOUND, "the control: three sets of prompts"), *_named("stands_for")]
    rows = [
        {"Fault": name, "What it stands for": text}
        | {title: cell(name, outcomes.get(c, {})) for c, title in COLUMNS.items()}
        for name, text in table
    ]
    reasons = [{"Fault": name, "Why these checks see it": text} for name, text in _named("why")]
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
        "Made by `tests/planted_table.py` from `sweeps/results/planted-faults/*.json`.\n",
    ]
    return "\n".join(parts)


def _named(field: str) -> list[tuple[str, str]]:
    return [(fault.name, getattr(fault, field)) for fault in (*FAULTS, *RANK_FAULTS)]


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(read_outcomes(RESULTS)))
