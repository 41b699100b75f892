"""Write docs/planted-faults.md from what the planted-fault tests recorded.

    NWOR_BENCH_PLANTED=sweeps/studies/planted-faults make test ARGS="-k planted"
    python sweeps/studies/planted-faults/planted_table.py

The tests append to outcomes.csv as each fault ends. faults.csv is written by hand: each fault,
what it stands for, and why the checks see it; a test compares its names with the planted faults.
"""

import csv
from collections import Counter
from pathlib import Path

import pandas as pd

RESULTS = Path(__file__).resolve().parent
PAGE = RESULTS.parents[2] / "docs" / "planted-faults.md"
SOUND = "none (sound run)"
"""The control row, as the tests record it."""

COLUMNS = {
    "CPU, tiny pair": ("cpu",),
    "CPU, tiny hybrid": ("cpu-states",),
    "GPU, real weights": ("gpu-real-full",),
    "GPU, 3B shape, 8 layers": ("gpu-shape-full",),
    "GPU, hybrid": ("gpu-states-full",),
    "H200, real weights": ("h200-real-eager", "h200-real-full"),
    "H200, 3B shape": ("h200-shape-eager", "h200-shape-full"),
}
"""Each column's recorded engines; results that differ between them are both shown. A column without
results is left out."""

Outcomes = dict[str, dict[str, list[str]]]
"""By engine and fault, the checks that saw it."""

INTRODUCTION = """\
# Planted faults

A check that cannot fail proves nothing. So we plant faults in our own code, run the sweep's gate on
a real engine, and record which checks see each one. No fault may pass.

**Only**: no other check sees the fault there. An empty cell was not run, or the fault does not
exist there. A column with two engines has eager engines and full CUDA graphs, which gave the same
result. Real weights: SmolLM2 with an EAGLE drafter, bf16.
[faults.csv](../sweeps/studies/planted-faults/faults.csv) says which mistake each fault stands for,
and why the checks see it; [outcomes.csv](../sweeps/studies/planted-faults/outcomes.csv) has every
result.
"""
BY_CHECK = """\
## Which check is needed?

A check is needed if some fault is seen by no other check on one of these engines.
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
local gate. *Graphs*: the graph that is timed gives the output of the gate's own, which copies each
layer's inputs. *Writes*: slots of staged rows hold a mark from a window's start to its commit;
afterwards as many rows are written as were counted, in every layer. *Ranks*: all ranks recorded the
same windows. *Last batch*: tokens, acceptance, K/V and states of a batch without instruments, as
timed ones are; listed if every batch before it passed. On a CPU acceptance is not checked once
tokens differ.

Timed batches have no write watch: a rejected draft that is written there and overwritten by the
next window changes no answer, row or count.

Faults at a switch exist only in interleaved batches, and the gate's interleaved batch finds them.
"""


NO_LAYERS = " Recorded before the local gate existed, so `layers` is missing."


def read_rows(folder: Path) -> pd.DataFrame:
    """Every recorded result, the latest of each fault and engine."""
    rows = pd.read_csv(folder / "outcomes.csv", dtype=str, keep_default_na=False)
    return rows.drop_duplicates(["engine", "fault"], keep="last")


def read_outcomes(folder: Path) -> Outcomes:
    """By engine what was recorded there."""
    found: Outcomes = {}
    for row in read_rows(folder).itertuples():
        found.setdefault(row.engine, {})[row.fault] = [c for c in row.checks.split("; ") if c]
    return found


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


def has_all_gates(found: dict[str, list[str]]) -> bool:
    """True if the local gate ran too."""
    return any("layers" in checks for checks in found.values())


def cell(fault: str, found: dict[str, list[str]]) -> str:
    """Which checks saw a fault; empty if it was not planted."""
    if fault not in found:
        return ""
    if fault == SOUND:
        return "passes" if not found[fault] else f"FALSE ALARM: {', '.join(found[fault])}"
    only = "**Only** " if len(found[fault]) == 1 and has_all_gates(found) else ""
    return f"{only}{', '.join(found[fault])}" if found[fault] else "NOT CAUGHT"


def shared_cell(fault: str, names: tuple[str, ...], outcomes: Outcomes) -> str:
    """The result that a column's engines share, otherwise each engine's."""
    found = {name: cell(fault, outcomes.get(name, {})) for name in names}
    if len(set(found.values())) == 1:
        return found[names[0]]
    return "; ".join(f"{name}: {text}" for name, text in found.items())


def seen_by(outcomes: Outcomes) -> pd.DataFrame:
    """For each check the faults that it sees on any engine, and those that only it sees on some
    engine; without engines that were recorded before the local gate existed."""
    outcomes = {name: found for name, found in outcomes.items() if has_all_gates(found)}
    sees: Counter[str] = Counter()
    only: dict[str, set[str]] = {}
    faults = {fault for found in outcomes.values() for fault in found}
    for fault in faults:
        by_engine = [found[fault] for found in outcomes.values() if fault in found]
        sees.update(set().union(*by_engine))
        for checks in by_engine:
            if len(checks) == 1:
                only.setdefault(checks[0], set()).add(fault)
    return pd.DataFrame(
        [
            {
                "Check": check,
                "Faults it sees": number,
                "Faults that only it sees": len(only.get(check, ())),
                "Which": "; ".join(sorted(only.get(check, ()))),
            }
            for check, number in sorted(sees.items(), key=lambda each: (-each[1], each[0]))
        ]
    )


def render(outcomes: Outcomes) -> str:
    """The page in Markdown."""
    columns = {
        title: names for title, names in COLUMNS.items() if any(n in outcomes for n in names)
    }
    rows = [
        {"Fault": fault}
        | {title: shared_cell(fault, names, outcomes) for title, names in columns.items()}
        for fault in (SOUND, *(fault["name"] for fault in read_faults(RESULTS)))
    ]
    facts = read_rows(RESULTS).groupby("engine", sort=False).last()
    origin = dict.fromkeys(
        f"- {title}: {told.device}, vLLM {told.vllm}, torch {told.torch}."
        + ("" if has_all_gates(outcomes[name]) else NO_LAYERS)
        for title, names in columns.items()
        for name, told in facts.loc[[n for n in names if n in outcomes]].iterrows()
    )
    parts = [
        INTRODUCTION,
        pd.DataFrame(rows).to_markdown(index=False) + "\n",
        "\n".join(origin) + "\n",
        BY_CHECK,
        seen_by(outcomes).to_markdown(index=False) + "\n",
        SIZES,
        sizes_table(RESULTS).to_markdown(index=False, disable_numparse=True) + "\n",
        CHECKS,
        "Made by `sweeps/studies/planted-faults/planted_table.py` from the files beside it.\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(read_outcomes(RESULTS)))
