"""What staging does to a window's time, by setting: tables of runs' cells."""

import pandas as pd

from nwor_bench.cli.plan_flags import load_configs, predict
from nwor_bench.models.byte_model import Workload

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
    own = cells[cells.host == host].groupby(keys, dropna=False)
    for (pair, requests, context, cache, acceptance), rows in own:
        named = {
            "model": pair.removesuffix("-shape"),
            "requests": f"{requests}",
            **({"context": f"{context:,.0f}"} if host in (4, 8) else {}),
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


def with_writes(cells: pd.DataFrame) -> list[pd.Series]:
    """The row of not writing alone, of each run of hosts 3 to 8 that has it."""
    writes = PARTS["writes (stage over control)"]
    return [
        rows.loc[writes]
        for host in (3, 4, 5, 6, 7, 8)
        for _, rows in settings_of(cells, host)
        if writes in rows.index
    ]


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
