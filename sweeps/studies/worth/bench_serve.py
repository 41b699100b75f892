r"""What `vllm bench serve` says of separate servers with fixed draft counts, beside `worth`.

    nwor-bench worth --requests 1,8 --max-draft-tokens 2 --output DIR
    VLLM_USE_V2_MODEL_RUNNER=0 python sweeps/studies/worth/bench_serve.py --worth DIR/worth.csv \
      --output DIR                                                          # without a GPU

Each arm is a stock `vllm serve` without plugins: `plain` has no drafter, `0` drafts nothing by
vLLM's own schedule, the others draft 1, 2, ... tokens. All servers stay up. Every repetition runs
vLLM's own benchmark against each of them, in random order and with the same prompts: as many
requests at once as the batch size, until all prompts are answered. Tokens/s over `0` are the
ratios of mean time per output token (TPOT) within repetitions; intervals need 10 of them. Servers
send the first token, then all others at once, and on a CPU the model has every core, as in `worth`
(vLLM's servers keep one for themselves): on two cores, handling each token in the server and the
client takes as long as the model does, and dilutes every ratio. --stream-interval 1 shows that.
Writes bench_serve.csv (a row a benchmark) and prints the comparison.
"""

import argparse
import json
import os
import signal
import sys
from contextlib import AbstractContextManager, ExitStack
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from agreement import agreement
from restarts import speculation, stop

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.workload.prompts import encode, load_prompts, load_tokenizer
from nwor_bench.workload.scenario import load_scenario

sys.path.append(str(Path(__file__).resolve().parents[1]))
import servers

MAX_MODEL_LEN = 1024
NO_PLUGINS = {"VLLM_PLUGINS": "", "KMP_BLOCKTIME": "5"}
"""Stock vLLM; threads of an idle server do not spin."""


def served(
    arguments: argparse.Namespace, arm: str, number: int
) -> AbstractContextManager[servers.Server]:
    """An arm's server; the ports of several differ by their `number`."""
    pair, largest = resolve_pair(arguments.pair), max(arguments.requests)
    config = speculation(pair, arm, [], largest)
    flags = [
        *("--dtype", arguments.dtype, "--enforce-eager", "--no-enable-prefix-caching"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(largest)),
        *("--kv-cache-memory-bytes", str(arguments.cache)),
        *("--stream-interval", str(arguments.stream_interval)),
        *(("--speculative-config", json.dumps(config)) if config else ()),
    ]
    environment = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", **os.environ, **NO_PLUGINS}
    port, log = arguments.port + number, arguments.output / f"server-{arm}.log"
    return servers.server(pair.target, port, log, flags, environment)


def benchmark(arguments: argparse.Namespace, base: str, size: int, prompts: Path) -> dict[str, Any]:
    """One load: as many requests at once as the batch size."""
    return servers.bench(base, [
        *("--model", resolve_pair(arguments.pair).target, "--dataset-name", "custom"),
        *("--dataset-path", str(prompts), "--custom-output-len", str(arguments.tokens)),
        *("--skip-chat-template", "--disable-shuffle"),
        *("--num-prompts", str(waves(size) * size), "--max-concurrency", str(size)),
    ])  # fmt: skip


def waves(size: int) -> int:
    """How often a batch of this size runs in one benchmark: its requests begin together, and no
    prefill interrupts others."""
    return max(1, 4 // size)


def measure(arguments: argparse.Namespace) -> pd.DataFrame:
    """Every repetition runs all arms on the same prompts, in random order; the first is dropped."""
    tokenizer = load_tokenizer(resolve_pair(arguments.pair).target)
    texts = load_prompts(load_scenario("short"))
    ids = encode(texts, tokenizer, MAX_MODEL_LEN, arguments.tokens)
    prompts = [tokenizer.decode(each) for each in ids]
    draw, rows = np.random.default_rng(0), []
    with ExitStack() as up:
        running = {
            arm: up.enter_context(served(arguments, arm, number))
            for number, arm in enumerate(arguments.arms)
        }
        for each in running.values():
            each.wait()
        for size in arguments.requests:
            for repetition in range(-1, arguments.repetitions):
                number = waves(size) * size
                own = islice(cycle(prompts), (repetition + 1) * number, (repetition + 2) * number)
                file = arguments.output / "prompts.jsonl"
                file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in own))
                for arm in map(str, draw.permutation(arguments.arms)):
                    found = benchmark(arguments, running[arm].base, size, file)
                    if repetition >= 0:
                        rows.append({"arm": arm, "requests": size, "repetition": repetition,
                                     "tpot_ms": found["mean_tpot_ms"],
                                     "tokens_per_s": found["output_throughput"]})  # fmt: skip
                pd.DataFrame(rows).to_csv(arguments.output / "bench_serve.csv", index=False)
    return pd.DataFrame(rows)


def compare(rows: pd.DataFrame, worth: pd.DataFrame) -> pd.DataFrame:
    """As `agreement` of batches, a token of every request being a window."""
    tokens = rows.assign(windows=1, tokens=rows.requests, seconds=rows.tpot_ms / 1e3)
    return agreement(tokens, worth, [], is_paired=True)


def main() -> None:
    """Measure, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--worth", type=pd.read_csv, required=True, help="worth.csv")
    parser.add_argument("--pair", default="smollm2")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--arms", nargs="+", default=["0", "1", "2"])
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--port", type=int, default=8123, help="of the first server")
    parser.add_argument("--stream-interval", type=int, default=1000, help="vLLM's")
    parser.add_argument("--repetitions", type=int, default=10, help="10 or more")
    parser.add_argument("--cache", type=int, default=1_000_000_000, help="bytes of a server's KV")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    arguments.output.mkdir(parents=True, exist_ok=True)
    found = compare(measure(arguments), arguments.worth)
    found.to_csv(arguments.output / "bench_serve_agreement.csv", index=False, float_format="%.4f")
    print(found.round(3).to_string(index=False))
    print(f"{sum(found.get('agrees', []))} of {len(found)} agree")


if __name__ == "__main__":
    main()
