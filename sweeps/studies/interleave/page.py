"""README.md from its three tables: python sweeps/studies/interleave/page.py"""

from pathlib import Path

import numpy as np
import pandas as pd
from text import TEXT

from nwor_bench.analysis.interleaved.robust import Estimate, robust_location
from nwor_bench.cli.plan_flags import load_configs, predict
from nwor_bench.models.byte_model import Workload

HERE = Path(__file__).parent
CHUNKS = 20
PLANTED = 0.3
"""Per cent of a window's time."""

NAMES = {
    "none": "nothing",
    "device": f"{PLANTED} % on the device",
    "host": f"{PLANTED} % on the host",
}
"""What was planted, for people."""

SIZES = (
    *(("llama-3b-shape", 3), ("llama-8b-shape", 6)),
    *(("gpt-oss-20b-shape", 3), ("gpt-oss-20b-shape", 6)),
)
"""Pairs whose rows are compared by size, and the host of each."""

PARTS = {
    "stage x graph over off": "stage x graph",
    "attention (control over off)": "control x off",
    "writes (stage over control)": "stage x graph over control x off",
}


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
            "cache": cache,
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
        {"cache": cache, "windows a run": length,
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
                "cache": cache,
                "planted": NAMES[kind],
                "all groups": told(located(part, "device")),
                "called slower": f"{counts['slower']} of {CHUNKS}",
                "called faster": f"{counts['faster']} of {CHUNKS}",
                "inside": f"{counts['inside']} of {CHUNKS}",
            }
        )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def run_table(planted: pd.DataFrame) -> str:
    """One row an arm, over its runs."""
    table = []
    for kind, runs in planted.groupby("kind"):
        low, high = runs.effect - runs.half_width, runs.effect + runs.half_width
        truth = PLANTED / 100 if kind == "device" else 0.0
        inside = ((low <= truth) & (truth <= high)).sum()
        table.append(
            {
                "planted": NAMES[kind],
                "runs": len(runs),
                "window ms": f"{runs.window_ms.min():.2f} to {runs.window_ms.max():.2f}",
                "half-width": f"{100 * runs.half_width.min():.2f} to "
                f"{100 * runs.half_width.max():.2f}",
                "called slower": f"{(low > 0).sum()} of {len(runs)}",
                "called faster": f"{(high < 0).sum()} of {len(runs)}",
                "inside": f"{inside} of {len(runs)}",
            }
        )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def precise(cells: pd.DataFrame) -> pd.DataFrame:
    """The first host's runs whose cells have intervals."""
    own = (cells.pair == "llama-3b-shape") & (cells.context == 1024) & (cells.host == 1)
    return cells[own & (cells.requests == 8)]


def bounds(row: pd.Series, name: str, low: str, high: str) -> str:
    """`0.9693 [0.9685, 0.9701]`."""
    return f"{row[name]:.4f} [{row[low]:.4f}, {row[high]:.4f}]"


def agreement_table(cells: pd.DataFrame) -> str:
    """Both ratios of every cell."""
    return beside_table(precise(cells))


def beside_table(rows: pd.DataFrame) -> str:
    """Windows beside whole batches, a row a cell."""
    table = [
        {
            "cache": row.cache,
            "cell": row.cell,
            "groups": f"{row.groups:.0f}",
            "windows": bounds(row, "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
            "whole batches": bounds(
                row, "ratio_batches", "ratio_batches_low", "ratio_batches_high"
            ),
        }
        for _, row in rows[rows.groups.notna()].iterrows()
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def in_per_cent(row: pd.Series) -> str:
    """`-3.07 +- 0.08`: a ratio of windows as a difference; empty without an interval."""
    if pd.isna(row.ratio_ci_low):
        return ""
    half = 50 * (row.ratio_ci_high - row.ratio_ci_low)
    return f"{100 * (row.ratio_to_off - 1):+.2f} +- {half:.2f}"


def settings_of(cells: pd.DataFrame, host: int) -> list[tuple[dict[str, str], pd.DataFrame]]:
    """A host's runs with intervals: what each is called, and its rows by cell."""
    keys = ["pair", "requests", "context", "cache", "acceptance"]
    found = []
    for (pair, requests, context, cache, acceptance), rows in cells[cells.host == host].groupby(
        keys
    ):
        named = {
            "model": pair.removesuffix("-shape"),
            "requests": f"{requests}",
            **({"context": f"{context:,.0f}"} if host == 4 else {}),
            "cache": cache,
            "tokens": f"{acceptance:g}",
        }
        by_cell = rows.set_index("cell")
        if by_cell.ratio_ci_low.notna().any():
            found.append((named, by_cell))
    return found


def parts_of(rows: pd.DataFrame) -> dict[str, str]:
    """Total, attention, writes and noise of one setting, as far as they have intervals."""
    idle = rows.loc["off x off (A/A)"]
    told = {
        heading: in_per_cent(rows.loc[cell]) if cell in rows.index else ""
        for heading, cell in PARTS.items()
    }
    return told | {"noise": f"+- {50 * (idle.ratio_ci_high - idle.ratio_ci_low):.2f}"}


def setting_table(cells: pd.DataFrame, host: int) -> str:
    """Every setting of a host."""
    table = [named | parts_of(rows) for named, rows in settings_of(cells, host)]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def size_table(cells: pd.DataFrame) -> str:
    """bf16 at 1k and 2.6 tokens, by the model's size, with the most that `plan` predicts."""
    table = [
        {"model": named["model"], "requests": named["requests"]}
        | parts_of(rows)
        | {"plan": f"-{100 * most_saved(pair, int(named['requests'])):.3f}"}
        for pair, host in SIZES
        for named, rows in settings_of(cells[cells.pair == pair], host)
        if (named["cache"], named["tokens"]) == ("bf16", "2.6")
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def most_saved(pair: str, requests: int) -> float:
    """The most of a step's bytes that not writing could save, a fraction: what `plan` says."""
    load = Workload(requests, context=1024, draft_tokens=4, acceptance=0.4)
    (config,) = load_configs([], None, pair)
    return predict(config, load, "auto", "auto").most_share


def beside_whole_batches(cells: pd.DataFrame) -> dict[str, float | int]:
    """How far whole batches are from windows: points of the third host, intervals of all."""
    rows = cells[(cells.host == 3) & cells.ratio_batches.notna() & cells.groups.notna()]
    pointed = rows[(rows.requests == 8) & rows.ratio_batches_low.isna()]
    measured = cells[cells.ratio_batches_low.notna() & cells.groups.notna()]
    settings = ["host", "pair", "requests", "context", "cache", "acceptance"]
    held = (measured.ratio_batches_low <= measured.ratio_to_off) & (
        measured.ratio_to_off <= measured.ratio_batches_high
    )
    return {
        "apart": 100 * (pointed.ratio_batches - pointed.ratio_to_off).abs().max(),
        "points": len(pointed),
        "batch_settings": len(pointed.groupby(["pair", "cache", "acceptance"])),
        "held": int(held.sum()),
        "intervals": len(measured),
        "interval_settings": len(measured.groupby(settings, dropna=False)),
    }


def again_table(cells: pd.DataFrame) -> str:
    """Every cell with an interval of the second host."""
    own = (cells.host == 2) & (cells.pair == "llama-3b-shape")
    rows = cells[own & cells.ratio_ci_low.notna() & cells.groups.notna()]
    table = [
        {
            "requests": row.requests,
            "cache": row.cache,
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
        named = {heading: in_per_cent(by_cell.loc[cell]) for heading, cell in PARTS.items()}
        table.append({"cache": cache, **named})
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def text_of(rows: pd.DataFrame, cells: pd.DataFrame, planted: pd.DataFrame) -> str:
    """The whole page."""
    rows, cells, planted = (
        table.assign(cache=table.cache.replace("auto", "bf16")) for table in (rows, cells, planted)
    )
    of_text = cells[cells.host == 7]
    parts = of_text.set_index("cell")
    idle = [located(part, "device") for _, part in
            rows[rows.kind == "none"].groupby(["cache", "requests"])]  # fmt: skip
    halves = [100 * each.half_width() for each in idle]
    device = rows[rows.kind == "device"]
    found = located(device, "device")
    stage = precise(cells)[precise(cells).cell == "stage x graph"]
    wider = (stage.ratio_batches_high - stage.ratio_batches_low) / (
        stage.ratio_ci_high - stage.ratio_ci_low
    )
    large = cells[(cells.host == 4) & (cells.requests == 256)].groups
    few = cells[
        (cells.host == 5) & cells.ratio_ci_low.isna() & (cells.cell == "stage x graph")
    ].iloc[0]
    of_8b = cells[(cells.host == 6) & (cells.pair == "llama-8b-shape") & (cells.requests == 64)]
    brief = of_8b[of_8b.cell == "stage x graph"].iloc[0]
    writes = PARTS["writes (stage over control)"]
    with_split = [
        rows.loc[writes]
        for host in (3, 4, 5, 6)
        for _, rows in settings_of(cells, host)
        if writes in rows.index
    ]
    capped = cells[(cells.host == 3) & (cells.requests == 64)]
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
        runs=run_table(planted),
        run_seconds=f"{planted.seconds.min():.0f} to {planted.seconds.max():.0f}",
        drift=f"{100 * (parts.ratio_batches['off x off (A/A)'] - 1):.0f}",
        real_text=beside_table(of_text),
        real_attention=in_per_cent(parts.loc["control x off"]),
        real_writes=in_per_cent(parts.loc["stage x graph over control x off"]),
        agreement=agreement_table(cells),
        again=again_table(cells),
        wider=wider.mean(),
        split=split_table(cells),
        by_setting=setting_table(cells, 3),
        large=setting_table(cells, 4),
        tuned=setting_table(cells, 5),
        sizes=size_table(cells),
        short=int(brief.groups),
        low=f"{brief.clock_low_mhz:,.0f}",
        high=f"{brief.clock_high_mhz:,.0f}",
        fewest=int(large.min()),
        groups=int(large.max()),
        few=few.groups,
        few_say=100 * (few.ratio_to_off - 1),
        writes_pay=sum(row.ratio_ci_high < 1 for row in with_split),
        settings=len(with_split),
        slowest=f"{capped.clock_low_mhz.min():,.0f}",
        fastest=f"{capped.clock_high_mhz.max():,.0f}",
        **beside_whole_batches(cells),
    )


if __name__ == "__main__":
    tables = [pd.read_csv(HERE / name) for name in ("groups.csv.gz", "cells.csv", "planted.csv")]
    (HERE / "README.md").write_text(text_of(*tables), encoding="utf-8")
