"""What does stock vLLM move of a hybrid's recurrent states? DRAM bytes a window, counted.

    python sweeps/studies/recurrent-bytes/measure.py --output DIR

An engine for each number of drafts, eager, mode off; on it a counted batch for each number of
requests, behind one that warms up. Needs a GPU whose counters may be read, and no other work on it.
Writes states.csv: medians over the windows in which all requests run, beside the prediction of
`nwor-bench plan`.
"""

import argparse
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from nwor_bench.cli.commands.plan import predict
from nwor_bench.engine.engine import VllmEngine, check_arguments
from nwor_bench.engine.protocol import Sampling
from nwor_bench.instruments.pm_sampling import run_under_own_cupti
from nwor_bench.models.byte_model import Workload
from nwor_bench.models.pairs import ResolvedPair, load_pair, resolve_pair
from nwor_bench.records.types import Phase
from nwor_bench.workload.config import RunSpec, load_scenario, resolve

PAIR = "qwen3-next-shape"
VOCABULARY = 32_000
WINDOWS = 24
"""Windows of a counted batch, before its first request ends."""

ACCEPTED = 2.0
"""Tokens gained a window: the same for every number of drafts, so as many windows."""


def spec_of(drafts: int, arguments: argparse.Namespace) -> RunSpec:
    """Eager, a prefill in one step, and memory for a state at every position of a window."""
    engine_args = {
        "enforce_eager": True,
        "max_num_batched_tokens": 16384,
        "gdn_prefill_backend": "triton",
    }
    return resolve(
        load_scenario("ctx-256"),
        requests=max(arguments.requests),
        draft_tokens=drafts,
        kv_cache_gib=arguments.kv_cache_gib,
        counters="dram",
        speculative_config=json.dumps({"synthetic_acceptance_length": ACCEPTED}),
        engine_args=json.dumps(engine_args),
    )


def prompts_of(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(10, VOCABULARY) for _ in range(tokens)] for _ in range(requests)]


def predicted(drafts: int, requests: int, tokens: int) -> dict[str, int]:
    """Bytes read, and bytes of states written, in the middle of a counted batch."""
    context = tokens + int(WINDOWS * ACCEPTED) // 2
    load = Workload(requests, context, drafts, acceptance=(ACCEPTED - 1) / drafts)
    shape = load_pair(PAIR).shape
    assert shape is not None
    model = predict(PAIR, shape.target, load, "auto", "auto").model
    assert model.shape.recurrent is not None
    states = model.shape.recurrent.moved(requests, drafts)
    read = states.read + model.weights_read(load) + model.context_read(load)
    return {"predicted_read_bytes": int(read), "predicted_written_bytes": int(states.written)}


def row_of(engine: VllmEngine, drafts: int, requests: int, tokens: int) -> dict[str, Any]:
    """One counted batch: medians over its full windows, and how well copies were counted."""
    sampling = Sampling(
        max_new_tokens=int(WINDOWS * ACCEPTED),
        temperature=0.0,
        top_p=1.0,
        seed=drafts,
        ignore_eos=True,
    )
    engine.generate(prompts_of(requests, tokens, seed=1), sampling)
    engine.set_counters(Phase.COUNTERS, True)
    output = engine.generate(prompts_of(requests, tokens, seed=2), sampling)
    engine.set_counters(Phase.COUNTERS, False)
    full = [window for window in output.windows if window.draft_tokens == requests * drafts][2:]
    counted = [window for window in full if window.dram_write_bytes is not None]
    facts = engine.status().recurrent
    assert facts is not None
    assert output.counter_facts is not None
    return {
        "draft_tokens": drafts,
        "requests": requests,
        "windows": len(counted),
        "read_bytes": median(window.dram_read_bytes for window in counted),
        "written_bytes": median(window.dram_write_bytes for window in counted),
        "layers": facts.layers,
        "state_bytes": facts.state_bytes,
        "conv_bytes": facts.conv_bytes,
        "copy_ratio": output.counter_facts["copy_ratio"],
        **predicted(drafts, requests, tokens),
    }


def main() -> None:
    """Measure every number of drafts and requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--kv-cache-gib", type=float, default=24)
    arguments = parser.parse_args()
    run_under_own_cupti()
    arguments.output.mkdir(parents=True, exist_ok=True)
    pair: ResolvedPair = resolve_pair(PAIR)
    rows = []
    for drafts in arguments.draft_tokens:
        spec = spec_of(drafts, arguments)
        check_arguments(pair, spec)
        engine = VllmEngine(pair, spec, arguments.output / f"engine-{drafts}.log")
        try:
            for requests in arguments.requests:
                rows.append(row_of(engine, drafts, requests, arguments.tokens))
                pd.DataFrame(rows).to_csv(arguments.output / "states.csv", index=False)
                print(rows[-1], flush=True)
        finally:
            engine.close()


if __name__ == "__main__":
    main()
