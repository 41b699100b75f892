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
    "CPU, tiny pair": ("cpu",),
    "H200, real weights": ("h200-real-eager", "h200-real-full"),
    "H200, 3B shape": ("h200-shape-eager", "h200-shape-full"),
}
"""Each column's recorded engines; results that differ between them are both shown."""

INTRODUCTION = """\
# Planted faults

A check that cannot fail proves nothing. So we plant faults in our own code, run the sweep's gate on
a real engine, and record which checks see each one. No fault may pass.

On an H200 eager engines and full CUDA graphs gave the same result, so they share a column. An empty
cell was not run, or the fault does not exist there. Real weights: SmolLM2 with an EAGLE drafter,
bf16. [faults.csv](../sweeps/studies/planted-faults/faults.csv) says which mistake each fault stands
for, and why the checks see it.
"""
SIZES = """\
## The smallest fault of each kind that the local gate sees

Each fault was planted in one layer, in shrinking sizes; the table has the smallest size that was
seen, with all larger ones seen too. Sizes of scale, output and V are relative: 0.003 is +0.3 %.
Smaller changes of a bf16 output are below its rounding step (0.4 %). Full graphs ran 8 requests of
1,024 tokens on one H200.

DeepSeek: the wrong scale is in our kernel, which attends the window there; stock attends the rest.
Qwen3-Next: recurrent states share the cache's memory, so blocks of no request are not watched.
"""
CHECKS = """\
## What each check compares

[The gate](methodology.md#before-timing-is-the-output-the-same) has the checks. *Layers* is the
local gate. *Writes*: slots of staged rows hold a mark from a window's start to its commit;
afterwards as many rows are written as were counted, in every layer. *Ranks*: all ranks recorded the
same windows. On a CPU acceptance is not checked once tokens differ.

Timed batches have no write watch: a rejected draft that is written there and overwritten by the
next window changes no answer, row or count.

Faults at a switch exist only in interleaved batches, and the gate's interleaved batch finds them.
"""


NO_LAYERS = " Recorded before the local gate existed, so `layers` is missing."


def read_outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """By engine what was recorded there; an engine without a file is left out."""
    files = {name: folder / f"{name}.json" for names in COLUMNS.values() for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def sizes_table(folder: Path) -> pd.DataFrame:
    """smallest.csv with a row for each fault; engines with the same sizes share a column."""
    found = pd.read_csv(folder / "smallest.csv")
    found["smallest"] = found["smallest"].map("{:g}".format)
    table = found.pivot(index="fault", columns="engine", values="smallest")
    ordered = table.loc[found["fault"].unique(), found["engine"].unique()].fillna("")
    alike: dict[tuple[str, ...], list[str]] = {}
    for engine in ordered:
        alike.setdefault(tuple(ordered[engine]), []).append(engine)
    merged = {"; ".join(engines): values for values, engines in alike.items()}
    return pd.DataFrame(merged, index=ordered.index).rename_axis("Fault").reset_index()


def read_faults(folder: Path) -> list[dict[str, str]]:
    """Every fault that the tests plant: `name`, `stands_for`, `why`."""
    with (folder / "faults.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_faults(folder: Path, faults: list[dict[str, str]]) -> None:
    """Replace the list; the tests call this."""
    pd.DataFrame(faults).to_csv(folder / "faults.csv", index=False)


def cell(fault: str, facts: dict[str, Any]) -> str:
    """Which checks saw a fault; empty if it was not planted.

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


def shared_cell(fault: str, names: tuple[str, ...], outcomes: dict[str, dict[str, Any]]) -> str:
    """The result that a column's engines share, otherwise each engine's."""
    found = {name: cell(fault, outcomes.get(name, {})) for name in names}
    if len(set(found.values())) == 1:
        return found[names[0]]
    return "; ".join(f"{name}: {text}" for name, text in found.items())


def render(outcomes: dict[str, dict[str, Any]]) -> str:
    """The page in Markdown."""
    rows = [
        {"Fault": fault}
        | {title: shared_cell(fault, names, outcomes) for title, names in COLUMNS.items()}
        for fault in (SOUND, *(fault["name"] for fault in read_faults(RESULTS)))
    ]
    recorded = [
        (title, outcomes[name]) for title, names in COLUMNS.items() for name in names
        if name in outcomes
    ]  # fmt: skip
    origin = dict.fromkeys(
        f"- {title}: {facts['device']}, vLLM {facts['vllm']}, torch {facts['torch']}."
        + ("" if any("layers" in seen for seen in facts["faults"].values()) else NO_LAYERS)
        for title, facts in recorded
    )
    checked_again = [
        f"- Checked again in {title}: {fault}; {what['why']}."
        for title, facts in recorded
        for fault, what in facts.get("rejudged", {}).items()
    ]
    parts = [
        INTRODUCTION,
        pd.DataFrame(rows).to_markdown(index=False) + "\n",
        "\n".join([*origin, *checked_again]) + "\n",
        SIZES,
        sizes_table(RESULTS).to_markdown(index=False, disable_numparse=True) + "\n",
        CHECKS,
        "Made by `sweeps/studies/planted-faults/planted_table.py` from the files beside it.\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(read_outcomes(RESULTS)))
