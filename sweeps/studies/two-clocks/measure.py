"""The step's and the work's ratio of each cell, from interleaved runs on a GPU.

    python sweeps/studies/two-clocks/measure.py RUN [RUN ...]      # writes cells.csv beside it

A row is a compared cell of one run folder of `nwor-bench sweep`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.store import read_run

FIELDS = (
    *("verdict", "groups", "ratio_to_off", "ratio_ci_low", "ratio_ci_high"),
    *("work_ratio", "work_ratio_ci_low", "work_ratio_ci_high", "nwor_fallback_count"),
)


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """One row a compared cell; what was not measured is empty."""
    run = read_run(folder)
    header = run.header
    for cell in analyse(run).cells:
        own = [w for w in run.windows if w.cell == cell.cell and w.work_ms is not None]
        times = pd.DataFrame({"step": [w.device_ms for w in own], "work": [w.work_ms for w in own]})
        yield {
            "pair": header.pair.name,
            "gpu": header.environment.gpus[0].name,
            "requests": header.scenario["requests"],
            "cache": header.engine.kv_cache_dtype,
            "cell": cell.label,
            "step_ms": times.step.median(),
            "work_ms": times.work.median(),
            **{name: getattr(cell, name) for name in FIELDS},
        }


def main() -> None:
    """Write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    rows = [row for folder in parser.parse_args().runs for row in rows_of(folder)]
    pd.DataFrame(rows).round(6).to_csv(Path(__file__).with_name("cells.csv"), index=False)


if __name__ == "__main__":
    main()
