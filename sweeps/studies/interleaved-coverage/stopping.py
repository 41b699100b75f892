"""Coverage of the interval with which `nwor-bench live` ends on its width.

    python sweeps/studies/interleaved-coverage/stopping.py [--runs 2000] [--output FOLDER]

Simulated groups of eight windows as in a server, one class, read every 20 groups until the
command's own rule ends; the width sought is that of the median run at 100 or 400 groups. Beside it
the rule of before: ended at the first look that is narrow, from 50 groups on. Writes stopping.csv.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import pandas as pd
from measure import Line
from simulated_groups import NOISES, Sample, Windows

from nwor_bench.cli.live_server import WidthRule
from nwor_bench.instruments.robust import Estimate, robust_location
from nwor_bench.records.window_order import SERVER_RUN_LENGTHS

SOUGHT = (100, 400)
READ_EVERY = 20
MOST = 4000
RULES = {"now": (200, True), "before": (50, False)}
"""First look, and whether as many groups follow."""


def located(values: np.ndarray) -> Estimate:
    """The interval of these groups."""
    found = robust_location(values)
    assert found is not None
    return found


def at_the_end(
    values: np.ndarray, ci_width: float, first: int, again: bool
) -> tuple[int, Estimate]:
    """Groups at the end, and their interval."""
    rule = WidthRule(ci_width, next_look=first)
    for groups in range(READ_EVERY, len(values) + 1, READ_EVERY):
        looks = rule.end_at is None and groups >= rule.next_look
        half = located(values[:groups]).half_width() if looks else None
        if rule.is_met(groups, half) or (rule.end_at is not None and not again):
            break
    return groups, located(values[:groups])


def lines_of(noise: str, runs: int) -> list[Line]:
    """A line a width and rule."""
    sample: Sample = NOISES[noise]
    if isinstance(sample, Windows):  # all runs are of one length
        sample = replace(sample, lengths=SERVER_RUN_LENGTHS)
    found: list[Line] = []
    for sought in SOUGHT:
        rng = np.random.default_rng([sought, list(NOISES).index(noise)])
        widths = [located(sample(rng, sought)).half_width() for _ in range(200)]
        ci_width = float(np.median(widths))
        for rule, (first, again) in RULES.items():
            ends = [at_the_end(sample(rng, MOST), ci_width, first, again) for _ in range(runs)]
            held = [abs(each.value) <= each.half_width() for _, each in ends]
            groups = float(np.median([number for number, _ in ends]))
            found.append(
                {
                    "noise": noise, "sought": sought, "ci_width": ci_width, "rule": rule,
                    "runs": runs, "held": float(np.mean(held)), "groups": groups,
                }
            )  # fmt: skip
    return found


def lines(runs: int) -> Iterator[Line]:
    """The lines of every noise."""
    with Pool(2) as pool:
        for found in pool.starmap(lines_of, [(noise, runs) for noise in NOISES], chunksize=1):
            yield from found


def main() -> None:
    """Simulate; write the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    table = args.output / "stopping.csv"
    pd.DataFrame(lines(args.runs)).to_csv(table, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
