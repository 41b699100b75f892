"""False positives of the harness: off against off, 40 times.

    python sweeps/studies/precision/measure_aa.py --folder /tmp/aa [--pair smollm2] [--runs 40]

Each run is a whole sweep of off x off and its A/A arm in one engine: gate, warm-up, blocks in
random order. Prints every run's ratio, interval and verdict, and the number of verdicts other
than SAME and AMBIGUOUS. At 95 % confidence 2 of 40 are expected, and more than 4 once in 20
times that this script is run; it ends with 1 then.
"""

import argparse
import sys

from nwor_bench.engine.preload import run_under_one_openmp

run_under_one_openmp()

from many_runs import ManyRuns, add_arguments, one_thread, percent, spec_of  # noqa: E402

from nwor_bench.records.types import Verdict  # noqa: E402

ALLOWED = 4


def main() -> int:
    """Run, print, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser, runs=40, batches=10)
    args = parser.parse_args()
    one_thread()
    runs = ManyRuns(args, spec_of(args))
    called, held = 0, 0
    for number in range(args.runs):
        data, cells = runs.run(number, f"{number:02d}")
        arm = next(cell for cell in cells if cell.arm is not None)
        assert arm.ratio_ci_low is not None, arm.reason
        assert arm.ratio_ci_high is not None
        called += arm.verdict not in (Verdict.SAME, Verdict.AMBIGUOUS)
        held += arm.ratio_ci_low <= 1 <= arm.ratio_ci_high
        print(
            f"{number + 1:3d}  {arm.batches:3d} blocks in {data.header.measuring_s:5.1f} s  "
            f"{arm.ratio_to_off:.4f} [{arm.ratio_ci_low:.4f}, {arm.ratio_ci_high:.4f}]  "
            f"+- {percent(arm.half_width)}  {arm.compared}  {arm.verdict}",
            flush=True,
        )
    runs.engine.close()
    print(f"{called} of {args.runs} called a difference; {held} intervals hold 1")
    return int(called > ALLOWED * max(1, args.runs / 40))


if __name__ == "__main__":
    sys.exit(main())
