"""README.md from its three tables: python sweeps/studies/interleave/page.py"""

from pathlib import Path
from typing import Any

import effect_tables as effects
import pandas as pd
import precision_tables as precision
from text import TEXT

HERE = Path(__file__).parent


def text_of(rows: pd.DataFrame, cells: pd.DataFrame, planted: pd.DataFrame) -> str:
    """The whole page."""
    rows, cells, planted = (
        table.assign(cache=table.cache.replace("auto", "bf16")) for table in (rows, cells, planted)
    )
    return TEXT.format(
        **of_groups(rows),
        **of_runs(planted),
        **of_cells(cells),
        **of_real_text(cells[cells.host == 7]),
        **effects.beside_whole_batches(cells),
    )


def of_groups(rows: pd.DataFrame) -> dict[str, Any]:
    """What the text says of the first host's groups."""
    idle = rows[rows.kind == "none"].groupby(["cache", "requests"])
    halves = [100 * precision.located(part, "device").half_width() for _, part in idle]
    device = rows[rows.kind == "device"]
    found = precision.located(device, "device")
    return {
        "best": min(halves),
        "worst": max(halves),
        "planted": precision.PLANTED,
        "found": 100 * found.value,
        "found_half": 100 * found.half_width(),
        "slower": precision.pieces_of(device, precision.PLANTED / 100)["slower"],
        "aa": precision.aa_table(rows),
        "lengths": precision.length_table(rows),
        "chunks": precision.CHUNKS,
        "pieces": precision.piece_table(rows),
    }


def of_runs(planted: pd.DataFrame) -> dict[str, Any]:
    """What it says of the runs in which something was planted."""
    by_arm = planted.set_index("kind")
    hidden, clear = (by_arm[by_arm.host == host] for host in (1, 2))
    idle = by_arm.loc["none"]
    return {
        "runs": precision.run_table(planted),
        "each": len(clear.loc["device"]),
        "clear_slower": (clear.effect > clear.half_width)["device"].sum(),
        "hidden_slower": (hidden.effect > hidden.half_width)["device"].sum(),
        "clear_half": 100 * clear.half_width.max(),
        "idle": len(idle),
        "idle_called": (idle.effect.abs() > idle.half_width).sum(),
    }


def of_cells(cells: pd.DataFrame) -> dict[str, Any]:
    """What it says of runs with random weights."""
    precise = effects.precise(cells)
    stage = precise[precise.cell == "stage x graph"]
    wider = (stage.ratio_batches_high - stage.ratio_batches_low) / (
        stage.ratio_ci_high - stage.ratio_ci_low
    )
    staged = cells[cells.cell == "stage x graph"]
    large = cells[(cells.host == 4) & (cells.requests == 256)].groups
    few = staged[(staged.host == 5) & staged.ratio_ci_low.isna()].iloc[0]
    of_8b = (staged.host == 6) & (staged.pair == "llama-8b-shape") & (staged.requests == 64)
    brief = staged[of_8b].iloc[0]
    capped = cells[(cells.host == 3) & (cells.requests == 64)]
    writes = effects.with_writes(cells)
    return {
        "agreement": effects.agreement_table(cells),
        "again": effects.again_table(cells),
        "wider": wider.mean(),
        "split": effects.split_table(cells),
        "by_setting": effects.setting_table(cells, 3),
        "large": effects.setting_table(cells, 4),
        "tuned": effects.setting_table(cells, 5),
        "paced": effects.setting_table(cells, 8),
        "sizes": effects.size_table(cells),
        "short": int(brief.groups),
        "low": f"{brief.clock_low_mhz:,.0f}",
        "high": f"{brief.clock_high_mhz:,.0f}",
        "fewest": int(large.min()),
        "groups": int(large.max()),
        "few": few.groups,
        "few_say": 100 * (few.ratio_to_off - 1),
        "writes_pay": sum(row.ratio_ci_high < 1 for row in writes),
        "writes_cost": sum(row.ratio_ci_low > 1 for row in writes),
        "costs": ", ".join(
            f"{100 * (row.ratio_to_off - 1):+.2f}" for row in writes if row.ratio_ci_low > 1
        ),
        "settings": len(writes),
        "slowest": f"{capped.clock_low_mhz.min():,.0f}",
        "fastest": f"{capped.clock_high_mhz.max():,.0f}",
    }


def of_real_text(cells: pd.DataFrame) -> dict[str, Any]:
    """What it says of the run with real weights and text."""
    by_cell = cells.set_index("cell")
    drift = by_cell.ratio_batches["off x off (A/A)"] - 1
    return {
        "real_text": effects.beside_table(cells),
        "real_attention": effects.in_per_cent(by_cell.loc["control x off"]),
        "real_writes": effects.in_per_cent(by_cell.loc["stage x graph over control x off"]),
        "drift": f"{100 * drift:.0f}",
    }


if __name__ == "__main__":
    tables = [pd.read_csv(HERE / name) for name in ("groups.csv.gz", "cells.csv", "planted.csv")]
    (HERE / "README.md").write_text(text_of(*tables), encoding="utf-8")
