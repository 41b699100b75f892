"""The study's tables from what measure.py wrote: groups.csv.gz and planted.csv.

    python sweeps/studies/interleave/compact.py --groups DIR...
    python sweeps/studies/interleave/compact.py --host 2 --planted FILE

The second adds to planted.csv, from a part of measure.py that ran several times: a row a run and
arm. `run_rows.py interleave` makes cells.csv.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd
from scipy.stats import spearmanr

from nwor_bench.stats.robust import robust_location

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tables import add_rows

HERE = Path(__file__).parent


def groups_of(folders: list[Path]) -> pd.DataFrame:
    """Every group of every part, effects in millionths."""
    files = [file for folder in folders for file in sorted(folder.glob("*.csv"))]
    rows = pd.concat(map(pd.read_csv, files))
    for clock in ("device", "host"):
        rows[clock] = (1e6 * rows[clock]).round().astype(int)
    return rows.drop(columns=["truth"]).round({"seconds": 1, "window_ms": 3})


def planted_of(file: Path) -> pd.DataFrame:
    """A row a run and arm: what was planted and what was found, in fractions of a window's time."""
    rows = []
    measured = pd.read_csv(file)
    for (kind, run), part in measured.groupby(["kind", "run"]):
        found = robust_location(part.device.to_numpy())
        assert found is not None
        rows.append(
            {
                "kind": kind, "run": run, "requests": part.requests.iloc[0],
                "context": part.context.iloc[0], "cache": part.cache.iloc[0],
                "seconds": part.seconds.max(),
                "groups": len(part), "window_ms": part.window_ms.median(),
                "sm_clock_mhz": part.sm_clock_mhz.min(), "truth": part.truth.mean(),
                "effect": found.value, "half_width": found.half_width,
                "together": spearmanr(part.device, part.host).statistic,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=Path, nargs="+", default=[])
    parser.add_argument("--host", type=int, default=1)
    parser.add_argument("--planted", type=Path)
    arguments = parser.parse_args()
    if arguments.planted:
        planted = planted_of(arguments.planted).assign(host=arguments.host)
        add_rows(HERE / "planted.csv", planted, ["host"])
    if arguments.groups:
        groups_of(arguments.groups).to_csv(HERE / "groups.csv.gz", index=False)


if __name__ == "__main__":
    main()
