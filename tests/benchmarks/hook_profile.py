"""Where does the host spend its time in the plugin? cProfile over one batch of each cell.

    python tests/benchmarks/hook_profile.py [--requests 8] [--calls 14]

The 3B shape under full CUDA graphs. First a batch without the profiler: the median time of the
hooks a window. Then one with it, which makes every call dearer: read the shares, not the times.
Needs a GPU.
"""

import argparse
import cProfile
import io
import json
import pstats
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import numpy as np
from one_engine import full_graphs

from nwor_bench.config import Overrides, load_scenario, resolve
from nwor_bench.engine import Sampling, VllmEngine
from nwor_bench.pairs import resolve_pair
from nwor_bench.records import Cell, NworMode, ScvMode

PAIR = "llama-3b-shape"

OUR_FILES = "|".join(
    rf"{path.name}:"
    for folder in ("nwor_bench/plugin", "kernels/nwor_kernels")
    for path in sorted((Path(__file__).resolve().parents[2] / folder).rglob("*.py"))
    if path.name != "__init__.py"
)
"""A pattern of the plugin's and the kernels' files, as pstats prints them."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--calls", type=int, default=14, help="functions to show")
    args = parser.parse_args()
    graphs = full_graphs(args.requests, args.draft_tokens)
    spec = resolve(
        load_scenario("ctx-1k"),
        Overrides(requests=args.requests, draft_tokens=args.draft_tokens, max_new_tokens=128),
        engine_args=json.dumps({"max_num_batched_tokens": 16384, "compilation_config": graphs}),
    )
    engine = VllmEngine(resolve_pair(PAIR), spec, Path(mkdtemp()) / "engine.log")
    random = np.random.default_rng(0)
    prompts = random.integers(1000, 100_000, (args.requests, 1024)).tolist()
    sampling = Sampling(spec.scenario.max_new_tokens, 0.0, 1.0, 0, True)
    for nwor in NworMode:
        for scv in ScvMode:
            engine.set_modes(Cell(PAIR, nwor, scv))
            for _ in range(2):  # the first captures and tries
                output = engine.generate(prompts, sampling)
            times = [1e3 * w["hook_ms"] for w in output.windows if w["hook_ms"] is not None]
            profile = cProfile.Profile()
            profile.enable()
            engine.generate(prompts, sampling)
            profile.disable()
            shown = io.StringIO()
            stats = pstats.Stats(profile, stream=shown).strip_dirs().sort_stats("cumulative")
            stats.print_stats(OUR_FILES, args.calls)
            rows = [line for line in shown.getvalue().splitlines() if line.strip()[:1].isdigit()]
            print(f"{nwor} x {scv}: hooks {median(times):.1f} us a window, {len(times)} windows")
            print("\n".join(rows))
    engine.close()


if __name__ == "__main__":
    main()
