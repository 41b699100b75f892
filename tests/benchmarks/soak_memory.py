"""Memory that the plugin holds while 200,000 requests pass through it, as CSV on stdout.

Pieces of a V2 runner, no engine: PYTHONPATH=.:kernels python tests/benchmarks/soak_memory.py
"""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plugin"))
from soak import memory_curve
from v2_pieces import make_hook


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--every", type=int, default=20_000)
    parser.add_argument("--nobody-reads", action="store_true", help="as with metrics off")
    options = parser.parse_args()
    print("requests,held_bytes,requests_known,windows_kept")
    with pytest.MonkeyPatch.context() as patch:
        hook = make_hook(patch)
        curve = memory_curve(hook, options.requests, options.every, not options.nobody_reads)
        for ended, held in curve:
            known, kept = hook.late.requests_known, len(hook.accumulator.windows)
            print(f"{ended},{held},{known},{kept}", flush=True)


if __name__ == "__main__":
    main()
