"""Does vLLM alone survive draft counts that change with the batch? No plugin runs here.

    python sweeps/studies/worth/stock_crash.py                           # several draft counts
    python sweeps/studies/worth/stock_crash.py --schedule "[[1, 128, 4]]"    # one
    python sweeps/studies/worth/stock_crash.py --graphs PIECEWISE

Requests arrive at random times (Poisson), at four rates one after another, at vLLM with an EAGLE
drafter, random weights and synthetic acceptance. Ends with "survived", or with vLLM's error.
"""

import argparse
import json
import os
import random
import time
from typing import Any

from nwor_bench.models.pairs import resolve_pair

RATES = ((1, 0.3), (8, 0.35), (32, 0.75), (128, 1.1))
"""Requests at a time, and the seconds that each takes."""


def vllm_of(arguments: argparse.Namespace) -> Any:
    """Stock vLLM in this process."""
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    pair = resolve_pair(arguments.pair)
    return LLM(
        model=pair.target,
        dtype=pair.dtype,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=128,
        kv_cache_memory_bytes=20_000_000_000,
        speculative_config={
            "method": pair.method,
            "model": pair.draft,
            "num_speculative_tokens": 4,
            "num_speculative_tokens_per_batch_size": json.loads(arguments.schedule),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.75, 0.56, 0.42, 0.32],
        },
        compilation_config={"cudagraph_mode": arguments.graphs},
    ).llm_engine


def serve(engine: Any, draw: random.Random, block: int) -> int:
    """Steps that a trace of requests takes."""
    from vllm import SamplingParams

    now, arrivals = 0.0, []
    for size, seconds in RATES:
        for _ in range(2 * size):
            now += draw.expovariate(0.8 * size / seconds)
            arrivals.append(now)
    params = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True, detokenize=False)
    began, come, done, steps = time.perf_counter(), 0, 0, 0
    while done < len(arrivals):
        waited = time.perf_counter() - began
        while come < len(arrivals) and arrivals[come] <= waited:
            prompt = [draw.randrange(5, 60_000) for _ in range(draw.randrange(20, 300))]
            engine.add_request(f"{block}-{come}", {"prompt_token_ids": prompt}, params)
            come += 1
        if done < come:
            done += sum(output.finished for output in engine.step())
            steps += 1
    return steps


def main() -> None:
    """Serve blocks until the end, or until vLLM dies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--schedule", default="[[1, 1, 4], [2, 31, 0], [32, 32, 3], [33, 128, 1]]")
    parser.add_argument("--graphs", default="FULL_AND_PIECEWISE", help="vLLM's cudagraph_mode")
    parser.add_argument("--blocks", type=int, default=6)
    arguments = parser.parse_args()
    engine, draw = vllm_of(arguments), random.Random(1)
    for block in range(arguments.blocks):
        print(f"block {block}: {serve(engine, draw, block)} steps", flush=True)
    print("survived", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
