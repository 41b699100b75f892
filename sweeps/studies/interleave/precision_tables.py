"""How narrow intervals are and what planted differences they find: tables of groups and of runs."""

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from nwor_bench.instruments.robust import Estimate, robust_location

CHUNKS = 20
PLANTED = 0.3
"""Per cent of a window's time."""

NAMES = {
    "none": "nothing",
    "device": f"{PLANTED} % on the device",
    "host": f"{PLANTED} % on the host",
}
"""What was planted, for people."""


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
            "SM clock MHz": span(part.sm_clock_mhz.min(), part.sm_clock_mhz.max()),
            "device's clock": told(located(part, "device")),
            "host's clock": told(located(part, "host")),
            "together": f"{spearmanr(part.device, part.host).statistic:.2f}",
        }
        for (cache, requests), part in parts
    ]
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)


def span(low: float, high: float) -> str:
    """`1980` or `1605 to 1965`, MHz or seconds."""
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
    """One row a context and arm, over its runs."""
    table = []
    for (_, context, kind), runs in planted.groupby(["host", "context", "kind"], sort=False):
        low, high = runs.effect - runs.half_width, runs.effect + runs.half_width
        truth = PLANTED / 100 if kind == "device" else 0.0
        inside = ((low <= truth) & (truth <= high)).sum()
        table.append(
            {
                "context": f"{context:,}",
                "planted": NAMES[kind],
                "runs": len(runs),
                "seconds": span(round(runs.seconds.min()), round(runs.seconds.max())),
                "window ms": f"{runs.window_ms.min():.2f} to {runs.window_ms.max():.2f}",
                "half-width": f"{100 * runs.half_width.min():.2f} to "
                f"{100 * runs.half_width.max():.2f}",
                "together": f"{runs.together.min():.2f} to {runs.together.max():.2f}",
                "called slower": f"{(low > 0).sum()} of {len(runs)}",
                "called faster": f"{(high < 0).sum()} of {len(runs)}",
                "inside": f"{inside} of {len(runs)}",
            }
        )
    return pd.DataFrame(table).to_markdown(index=False, disable_numparse=True)
