"""The study's two tables from what was measured: groups.csv.gz of measure.py, cells.csv of runs.

python sweeps/studies/interleave/compact.py --groups DIR... --runs RUN_FOLDER...
python sweeps/studies/interleave/compact.py --host 3 --runs RUN_FOLDER...
python sweeps/studies/interleave/compact.py --host 2 --planted FILE

The second puts runs of another host behind those of hosts with a lower number. The third does so in
planted.csv, from a part of measure.py that ran several times: a row a run and arm.
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import read_run
from nwor_bench.stats.robust import robust_location

HERE = Path(__file__).parent
CELL_FIELDS = (
    *("compared", "groups", "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
    *(
        "batches",
        "ratio_batches",
        "ratio_batches_low",
        "ratio_batches_high",
        "tokens_per_s",
        "verdict",
    ),
)


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


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """A row a cell, and one for the split's second part."""
    run = read_run(folder)
    spec = run.header.spec
    found = analyse(run)
    cells = found.cells
    conditions = [batch.conditions for batch in run.batches if batch.phase == "interleaved"]
    clocks = [c["gpu_sm_clock_mhz"] for c in conditions if "gpu_sm_clock_mhz" in c]
    setting = {
        "pair": (run.header.pair.name if run.header.pair else ""),
        "requests": spec.scenario["requests"],
        "context": spec.scenario["prompts"]["tokens"],
        "cache": spec.engine_args.get("kv_cache_dtype", "auto"),
        "acceptance": _acceptance_length(run.header),
        "clock_low_mhz": min(clocks, default=None),
        "clock_high_mhz": max(clocks, default=None),
    }
    rows = [
        {**setting, "cell": cell.label, **{name: getattr(cell, name) for name in CELL_FIELDS}}
        for cell in cells
    ]
    for split in found.splits:
        part = split.writes
        bounds = {"ratio_to_off": part.value, "ratio_ci_low": part.low, "ratio_ci_high": part.high}
        rows.append({**setting, "cell": f"{split.cell.label} over {split.control.label}", **bounds})
    return rows


def _acceptance_length(header: RunHeader) -> float | None:
    """Tokens that vLLM accepts a window on average, as the run or its pair has them set."""
    of_run = header.spec.speculative_config or {}
    of_pair = header.pair.speculative if header.pair else {}
    return {**of_pair, **of_run}.get("synthetic_acceptance_length")


def behind_others(found: pd.DataFrame, host: int, file: Path) -> None:
    """Write what a host gave behind what `file` has of hosts with a lower number."""
    found = found.assign(host=host)
    if host > 1:
        kept = pd.read_csv(file)
        found = pd.concat([kept[kept.host < host], found])
    found.to_csv(file, index=False, float_format="%.6g")


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=Path, nargs="+", default=[])
    parser.add_argument("--host", type=int, default=1)
    parser.add_argument("--runs", type=Path, nargs="+", default=[])
    parser.add_argument("--planted", type=Path)
    arguments = parser.parse_args()
    if arguments.planted:
        behind_others(planted_of(arguments.planted), arguments.host, HERE / "planted.csv")
    if arguments.groups:
        groups_of(arguments.groups).to_csv(HERE / "groups.csv.gz", index=False)
    if arguments.runs:
        found = [row for folder in arguments.runs for row in cells_of(folder)]
        behind_others(pd.DataFrame(found), arguments.host, HERE / "cells.csv")


if __name__ == "__main__":
    main()
