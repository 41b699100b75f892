r"""What does interleaving cost a server? off, stage and interleave under `vllm bench serve`.

    python sweeps/studies/live-serving/measure.py --pair llama-3b-shape --output DIR
    python sweeps/studies/live-serving/measure.py --pair tiny --modes off stage interleave \
      --seconds 10 --most 4 --input 64 --tokens 64 --output DIR \
      --flags "--kv-cache-memory-bytes 200000000 --enforce-eager --block-size 32"   # without a GPU

A server for each mode; all stay up, so their caches must fit side by side. The first is asked for
its capacity: as many requests at once as it takes. It is stock vLLM, without the plugin; on a CPU
it is mode off, because there the plugin brings an attention of its own for every mode. In each
round every server gets the same open-loop loads (Poisson) at 50 % and at 90 % of that, and then as
many at once, or the loads of --loads. The order of servers is random for each load; the others are
idle. Greedy answers to fixed prompts are compared with the first's if acceptance follows the model.
Writes serving.csv, one row a mode, load and round.
"""

import argparse
import json
import os
import random
import shlex
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.models.pairs import ResolvedPair, resolve_pair

sys.path.append(str(Path(__file__).resolve().parents[1]))
import servers
from servers import Server

MODES: dict[str, dict[str, str]] = {
    "stock": {"VLLM_PLUGINS": ""},
    "off": {"VLLM_NWOR_MODE": "off", "VLLM_SCV_MODE": "off"},
    "stage": {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "graph"},
    "interleave": {"VLLM_NWOR_MODE": "interleave"},
}
DEFAULT_MODES = ("stock", "stage", "interleave")
SHARES = {"50%": 0.5, "90%": 0.9, "all at once": float("inf")}
WARM_UP_SEED, CAPACITY_SEED = 1000, 1001

PROMPTS = [f"{word} two {word} two {word * n} two" for n, word in enumerate("abcdefgh", 1)]
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "output_throughput"),
    *("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "median_ttft_ms"),
)


def drafting_of(pair: ResolvedPair) -> dict[str, Any]:
    """vLLM's speculative configuration: four drafts."""
    return {
        "method": pair.method,
        "num_speculative_tokens": 4,
        **pair.speculative,
        **({"model": pair.draft} if pair.draft else {}),
    }


def server(
    pair: ResolvedPair, arguments: argparse.Namespace, mode: str, number: int = 0
) -> AbstractContextManager[Server]:
    """Start one in this mode; the ports of several differ by their `number`."""
    flags = [
        *("--dtype", pair.dtype, "--max-model-len", "2048"),
        *("--max-num-seqs", str(arguments.most)),
        *("--speculative-config", json.dumps(drafting_of(pair))),
        *("--served-model-name", "model"),
        *(("--load-format", pair.load_format) if pair.load_format else ()),
        *shlex.split(arguments.flags),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_NWOR")}
    kept.pop("VLLM_PLUGINS", None)
    port, log = arguments.port + number, arguments.output / f"{mode}.log"
    return servers.server(pair.target, port, log, flags, kept | MODES[mode])


def bench(
    base: str,
    pair: ResolvedPair,
    arguments: argparse.Namespace,
    rate: float,
    requests: int,
    seed: int,
) -> dict[str, float]:
    """One load: its result's numbers."""
    flags = [
        *("--backend", "vllm", "--model", "model"),
        *("--tokenizer", pair.target, "--dataset-name", "random"),
        *("--random-input-len", str(arguments.input), "--random-output-len", str(arguments.tokens)),
        *("--num-prompts", str(requests), "--request-rate", str(rate), "--seed", str(seed)),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"),
    ]
    found = servers.bench(base, flags)
    return {name: found[name] for name in KEPT if name in found}


def answers(base: str) -> list[str]:
    """Greedy answers to the fixed prompts."""
    texts = []
    for prompt in PROMPTS:
        body = {"model": "model", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        request = Request(f"{base}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urlopen(request, timeout=60) as reply:
            texts.append(json.load(reply)["choices"][0]["text"])
    return texts


def metrics(base: str) -> dict[str, float]:
    """Our counters on /metrics, summed over labels; none in stock vLLM."""
    with urlopen(f"{base}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("nwor_") and sample.name.endswith("_total"):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def arguments_of(description: str | None) -> argparse.Namespace:
    """Servers and loads from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=DEFAULT_MODES)
    parser.add_argument("--loads", nargs="+", choices=SHARES, default=tuple(SHARES))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10, help="of each load")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--most", type=int, default=64, help="requests at once")
    parser.add_argument("--port", type=int, default=8123, help="of the first server")
    parser.add_argument("--flags", default="", help="further flags of vllm serve, in one string")
    return parser.parse_args()


def main() -> None:
    """Measure all modes."""
    arguments = arguments_of(__doc__)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pair = resolve_pair(arguments.pair)
    os.environ["VLLM_PLUGINS"] = ""  # of the client, which runs in this process
    with ExitStack() as up:
        running = {
            mode: up.enter_context(server(pair, arguments, mode, number))
            for number, mode in enumerate(arguments.modes)
        }
        for each in running.values():
            each.wait()
        bases = {mode: each.base for mode, each in running.items()}
        given = {mode: answers(base) for mode, base in bases.items()}
        for base in bases.values():
            for rate, requests in ((float("inf"), arguments.most), (4.0, 12)):
                bench(base, pair, arguments, rate, requests, WARM_UP_SEED)
        most = 4 * arguments.most
        first = arguments.modes[0]
        load = bench(bases[first], pair, arguments, float("inf"), most, CAPACITY_SEED)
        rows: list[dict[str, Any]] = [{"mode": first, "load": "all at once", **load}]
        capacity = load["request_throughput"]
        same = {mode: given[mode] == given[first] for mode in arguments.modes}
        for number in range(arguments.rounds * len(arguments.loads)):
            name = arguments.loads[number % len(arguments.loads)]
            rate = SHARES[name] * capacity
            requests = most if rate == float("inf") else int(rate * arguments.seconds) + 1
            for mode in random.Random(number).sample(arguments.modes, len(arguments.modes)):
                load = bench(bases[mode], pair, arguments, rate, requests, number)
                place = {"mode": mode, "load": name, "round": number // len(arguments.loads)}
                counted = metrics(bases[mode])
                rows.append({**place, "rate": rate, **load, "same_answers": same[mode], **counted})
                pd.DataFrame(rows).to_csv(arguments.output / "serving.csv", index=False)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
