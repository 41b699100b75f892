"""README.md from groups.csv.gz and cells.csv: python sweeps/studies/interleave/page.py"""

from pathlib import Path

import numpy as np
import pandas as pd

from nwor_bench.analysis.interleaved.robust import Estimate, robust_location

HERE = Path(__file__).parent
CHUNKS = 20
PLANTED = 0.3
"""Per cent of a window's time."""

TEXT = """# How precise is a comparison within one batch?

Off x off against itself is known to +- {best:.3f} % after 48 s at 8 requests, and to
+- {worst:.2f} % at worst (256 requests, fp8 cache). A spin of {planted} % on the device is measured
as {found:+.3f} +- {found_half:.3f} %. In 20 pieces of 2.4 s it is called slower in {slower} of 20.

    python sweeps/studies/interleave/measure.py 8 64 256 8:device 8:host --seconds 48 --output DIR
    python sweeps/studies/interleave/measure.py 8 64 256 --cache-dtype fp8 --seconds 45 --output DIR
    nwor-bench sweep --file sweeps/h200-split.toml

Two NVIDIA H200 of one host (vLLM 0.32.0, torch 2.11, Triton 3.6), each with one process; clocks not
locked. Llama-3.2-3B's shape, k = 4, synthetic acceptance of 2.6 tokens a window, full CUDA graphs,
1,024 tokens of context (256 with 256 requests). [groups.csv.gz](groups.csv.gz) has every group,
[cells.csv](cells.csv) the runs; `compact.py` made both, `page.py` this page.

## Off x off against itself

Per cent of a window's time, with half the 95 % interval; the aim was 0.2 % in 60 s.

{aa}

The two clocks differ because the host runs ahead of the device: what makes it late for one window
is caught up in the next. Ratios are those of the device's clock.

## Does a longer run of windows give another result?

A run's first window is left out. If something were left behind in caches, the effect would change
with the length of a run. Off x off against itself, device's clock, 8 requests, per cent:

{lengths}

## Planted slow-downs

At 8 requests; each of the {chunks} pieces has its own interval. "Inside": the truth lies in it.

{pieces}

A host's wait of {planted} % (15 us) costs nothing there: the device sets the pace, and the host
catches up. The truth of that row is therefore 0.

## Windows against whole batches

8 requests, 50 s a run; three whole batches of every cell. Ratio to off x off:

{agreement}

All six agree. The interval of three whole batches is {wider:.0f} times as wide for stage x graph.

## What stage x graph is made of

`control` has the attention of stage and the writes of off. Per cent of a window's time, 8 requests:

{split}

With an fp8 cache two thirds of the gain are writes: stock's write kernel takes twice as long there,
since it quantises.

## Again, on other hosts

    nwor-bench sweep --file sweeps/h200-split.toml       # acceptance 2.6, 70 s a run
    nwor-bench sweep --file sweeps/h200-families.toml    # Qwen3-30B-A3B, with 38 s a run

Other H200s, a later version of the plugin, two processes side by side. At 8 requests the result of
the 3B shape holds, and windows agree with three whole batches in all six cells. At 64 requests the
host's processors were busy: windows took 9 to 14 ms where the device needs 8.5, and off x off
against itself is known to no better than 1 to 2.5 %. After 36 s Qwen3-30B-A3B has no answer.

{again}

## What was not measured

With 64 requests, with 8,192 tokens of context and with the 8B shape these runs have 3 to 8 groups a
cell (an interval needs 10): the whole batches at the start took the 40 to 50 s that a run had.
Since then whole batches check blocks 1, 8 and 16. The planted parts ran once each, in pieces of
2.4 s rather than 20 runs of 60 s.
"""


def located(rows: pd.DataFrame, clock: str) -> Estimate:
    """The effect of these groups, in millionths."""
    found = robust_location(rows[clock].to_numpy() / 1e6)
    assert found is not None
    return found


def told(found: Estimate, digits: int = 3) -> str:
    """`+0.012 +- 0.034`, in per cent."""
    return f"{100 * found.value:+.{digits}f} +- {100 * found.half_width():.{digits}f}"


def aa_table(rows: pd.DataFrame) -> str:
    """One row a part in which nothing was planted."""
    parts = rows[rows.kind == "none"].groupby(["cache", "requests"])
    table = [
        {
            "cache": "bf16" if cache == "auto" else cache,
            "requests": requests,
            "seconds": f"{part.seconds.max():.0f}",
            "groups": len(part),
            "window ms": f"{part.window_ms.mean():.2f}",
            "SM clock MHz": clocks(part.sm_clock_mhz.min(), part.sm_clock_mhz.max()),
            "device's clock": told(located(part, "device")),
            "host's clock": told(located(part, "host")),
        }
        for (cache, requests), part in parts
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def clocks(low: float, high: float) -> str:
    """`1980` or `1605 to 1965`."""
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def length_table(rows: pd.DataFrame) -> str:
    """By run length."""
    parts = rows[(rows.kind == "none") & (rows.requests == 8)].groupby(["cache", "run_length"])
    table = [
        {"cache": "bf16" if cache == "auto" else cache, "windows a run": length,
         "groups": len(part), "effect": told(located(part, "device"))}
        for (cache, length), part in parts
    ]  # fmt: skip
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def pieces_of(part: pd.DataFrame, truth: float) -> dict[str, int]:
    """What each of the pieces says, alone."""
    found = [
        located(part.iloc[rows], "device") for rows in np.array_split(range(len(part)), CHUNKS)
    ]
    low = np.array([each.value - each.half_width() for each in found])
    high = np.array([each.value + each.half_width() for each in found])
    return {
        "slower": int((low > 0).sum()),
        "faster": int((high < 0).sum()),
        "inside": int(((low <= truth) & (truth <= high)).sum()),
    }


def piece_table(rows: pd.DataFrame) -> str:
    """One row a part at 8 requests."""
    table = []
    for (cache, kind), part in rows[rows.requests == 8].groupby(["cache", "kind"]):
        truth = PLANTED / 100 if kind == "device" else 0.0
        counts = pieces_of(part, truth)
        table.append(
            {
                "cache": "bf16" if cache == "auto" else cache,
                "planted": {
                    "none": "nothing",
                    "device": f"{PLANTED} % on the device",
                    "host": f"{PLANTED} % on the host",
                }[kind],
                "all groups": told(located(part, "device")),
                "called slower": f"{counts['slower']} of {CHUNKS}",
                "called faster": f"{counts['faster']} of {CHUNKS}",
                "inside": f"{counts['inside']} of {CHUNKS}",
            }
        )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def precise(cells: pd.DataFrame) -> pd.DataFrame:
    """Runs whose cells have intervals."""
    own = (cells.pair == "llama-3b-shape") & (cells.context == 1024) & (cells.host == 1)
    return cells[own & (cells.requests == 8)]


def bounds(row: pd.Series, name: str, low: str, high: str) -> str:
    """`0.9693 [0.9685, 0.9701]`."""
    return f"{row[name]:.4f} [{row[low]:.4f}, {row[high]:.4f}]"


def agreement_table(cells: pd.DataFrame) -> str:
    """Both ratios of every cell."""
    rows = precise(cells)
    rows = rows[rows.groups.notna()]
    table = [
        {
            "cache": "bf16" if row.cache == "auto" else row.cache,
            "cell": row.cell,
            "groups": f"{row.groups:.0f}",
            "windows": bounds(row, "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
            "whole batches": bounds(
                row, "ratio_batches", "ratio_batches_low", "ratio_batches_high"
            ),
        }
        for _, row in rows.iterrows()
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def again_table(cells: pd.DataFrame) -> str:
    """Every cell with an interval of the second host."""
    rows = cells[(cells.host == 2) & cells.ratio_ci_low.notna() & cells.groups.notna()]
    table = [
        {
            "model": row.pair.removesuffix("-shape"),
            "requests": row.requests,
            "cache": "bf16" if row.cache == "auto" else row.cache,
            "cell": row.cell,
            "groups": f"{row.groups:.0f}",
            "windows": bounds(row, "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
            "whole batches": bounds(row, "ratio_batches", "ratio_batches_low", "ratio_batches_high")
            if pd.notna(row.ratio_batches_low)
            else "",
        }
        for _, row in rows.iterrows()
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def split_table(cells: pd.DataFrame) -> str:
    """Total, attention and writes of each cache."""
    table = []
    for cache, rows in precise(cells).groupby("cache"):
        by_cell = rows.set_index("cell")
        parts = {
            "stage x graph over off": "stage x graph",
            "attention (control over off)": "control x off",
            "writes (stage over control)": "stage x graph over control x off",
        }
        named = {
            heading: f"{100 * (row.ratio_to_off - 1):+.2f} +- "
            f"{50 * (row.ratio_ci_high - row.ratio_ci_low):.2f}"
            for heading, cell in parts.items()
            for row in [by_cell.loc[cell]]
        }
        table.append({"cache": "bf16" if cache == "auto" else cache, **named})
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def text_of(rows: pd.DataFrame, cells: pd.DataFrame) -> str:
    """The whole page."""
    idle = [located(part, "device") for _, part in
            rows[rows.kind == "none"].groupby(["cache", "requests"])]  # fmt: skip
    halves = [100 * each.half_width() for each in idle]
    device = rows[rows.kind == "device"]
    found = located(device, "device")
    stage = precise(cells)[precise(cells).cell == "stage x graph"]
    wider = (stage.ratio_batches_high - stage.ratio_batches_low) / (
        stage.ratio_ci_high - stage.ratio_ci_low
    )
    return TEXT.format(
        best=min(halves),
        worst=max(halves),
        planted=PLANTED,
        found=100 * found.value,
        found_half=100 * found.half_width(),
        slower=pieces_of(device, PLANTED / 100)["slower"],
        aa=aa_table(rows),
        lengths=length_table(rows),
        chunks=CHUNKS,
        pieces=piece_table(rows),
        agreement=agreement_table(cells),
        again=again_table(cells),
        wider=wider.mean(),
        split=split_table(cells),
    )


if __name__ == "__main__":
    page = text_of(pd.read_csv(HERE / "groups.csv.gz"), pd.read_csv(HERE / "cells.csv"))
    (HERE / "README.md").write_text(page, encoding="utf-8")
