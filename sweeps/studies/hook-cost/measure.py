"""Cost of the hooks: off x off attached against detached, interleaved.

    python sweeps/studies/hook-cost/measure.py [--pair smollm2] [--blocks 20] [--what nvtx]

One engine; each block runs the same prompts on, off, off, on (or the reverse, alternating),
so that drift within the block cancels. Prints the ratio of latencies, attached over detached,
with its 95 % interval; and that of the block's two runs without, which shows the noise. With
`--what nvtx` NVTX ranges are switched instead of the hooks; run it under a profiler (or with
NVTX_INJECTION64_PATH), because ranges cost less without a listener.
"""

import argparse
from pathlib import Path
from tempfile import mkdtemp

from nwor_bench.engine.preload import run_under_one_openmp

run_under_one_openmp()

from nwor_bench.engine.engine import VllmEngine  # noqa: E402
from nwor_bench.engine.protocol import Sampling  # noqa: E402
from nwor_bench.models.pairs import resolve_pair  # noqa: E402
from nwor_bench.stats.paired import paired_ratio  # noqa: E402
from nwor_bench.workload.config import load_scenario, resolve  # noqa: E402
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer  # noqa: E402
from nwor_bench.workload.schedule import select_blocks  # noqa: E402


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--what", choices=("hooks", "nvtx"), default="hooks")
    parser.add_argument("--engine-args", help="vLLM's JSON")
    args = parser.parse_args()
    spec = resolve(load_scenario("short"), engine_args=args.engine_args)
    scenario = spec.scenario
    pair = resolve_pair(args.pair)
    tokenizer = load_tokenizer(pair.target)
    prompts = load_prompts(scenario)
    engine = VllmEngine(pair, spec, Path(mkdtemp()) / "engine.log")
    switch = {"hooks": engine.set_hooks, "nvtx": engine.set_nvtx}[args.what]
    sampling = Sampling(scenario.max_new_tokens, 0.0, 1.0, spec.seed, True)
    latencies: dict[bool, list[float]] = {True: [], False: []}
    again: tuple[list[float], list[float]] = ([], [])
    blocks = select_blocks(prompts, scenario.requests, args.blocks + 1, spec.seed)
    for block, chosen in enumerate(blocks):
        ids = encode(chosen, tokenizer, scenario.max_model_len, scenario.max_new_tokens)
        taken: dict[bool, list[float]] = {True: [], False: []}
        first = block % 2 == 0
        for attached in (first, not first, not first, first):
            switch(attached)
            taken[attached].append(engine.generate(ids, sampling).latency_ms)
        if block:  # the first block warms up
            for attached, both in taken.items():
                latencies[attached].append(sum(both))
            for run, latency in zip(again, taken[False], strict=True):
                run.append(latency)
        switch(True)
    for what, above, below in (("on / off", latencies[True], latencies[False]),
                               ("off / off", again[1], again[0])):  # fmt: skip
        interval = paired_ratio(above, below)
        print(
            f"{args.pair}, {args.blocks} blocks: {args.what} {what} = {interval.value:.4f} "
            f"[{interval.low:.4f}, {interval.high:.4f}]"
        )


if __name__ == "__main__":
    main()
