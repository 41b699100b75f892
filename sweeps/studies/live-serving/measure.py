r"""What does taking turns cost a server? off, stage and interleave under `vllm bench serve`.

    python sweeps/studies/live-serving/measure.py --pair llama-3b-shape --output DIR
    python sweeps/studies/live-serving/measure.py --pair tiny --seconds 10 --most 4 --input 64 \
      --flags "--kv-cache-memory-bytes 200000000 --enforce-eager" --output DIR    # without a GPU

A server for each mode, one after the other. The first, stock vLLM without the plugin, is asked for
its capacity: as many requests at once as it takes. Each server then gets open-loop load (Poisson)
at 50 % and 90 % of that. Greedy answers to fixed prompts are compared with stock's where acceptance
follows the model. Writes serving.csv, one row a mode and rate.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.models.pairs import ResolvedPair, resolve_pair

MODES: dict[str, dict[str, str]] = {
    "stock": {"VLLM_PLUGINS": ""},
    "stage": {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "graph"},
    "interleave": {"VLLM_NWOR_MODE": "interleave"},
    "stock again": {"VLLM_PLUGINS": ""},
}
SHARES = (0.5, 0.9)
START_S = 400
BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`, whose command the CPU build does not have."""

PROMPTS = [f"{word} two {word} two {word * n} two" for n, word in enumerate("abcdefgh", 1)]
KEPT = (
    *("completed", "failed", "duration", "request_throughput", "output_throughput"),
    *("mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "median_ttft_ms"),
)


@contextmanager
def server(
    pair: ResolvedPair, arguments: argparse.Namespace, mode: str, log: Path
) -> Iterator[str]:
    """The address of vLLM's API server in this mode, once it answers."""
    drafting: dict[str, Any] = {
        "method": pair.method,
        "num_speculative_tokens": 4,
        **pair.speculative,
        **({"model": pair.draft} if pair.draft else {}),
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", pair.target),
        *("--port", str(arguments.port), "--dtype", pair.dtype, "--max-model-len", "2048"),
        *("--max-num-seqs", str(arguments.most), "--speculative-config", json.dumps(drafting)),
        *("--served-model-name", "model"),
        *(("--load-format", pair.load_format) if pair.load_format else ()),
        *shlex.split(arguments.flags),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_NWOR")}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=kept | MODES[mode]
        )
        try:
            base = f"http://127.0.0.1:{arguments.port}"
            _wait(child, base, log)
            yield base
        finally:
            child.terminate()
            child.wait(60)


def _wait(child: subprocess.Popen[bytes], base: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if child.poll() is not None:
            raise SystemExit(f"the server ended; its log: {log}")
        try:
            with urlopen(f"{base}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"no server within {START_S} s; its log: {log}")


def bench(
    base: str, pair: ResolvedPair, arguments: argparse.Namespace, rate: float, requests: int
) -> dict[str, float]:
    """One load of `vllm bench serve`: its result file's numbers."""
    result = arguments.output / "result.json"
    command = [
        *(sys.executable, "-c", BENCH, "--backend", "vllm", "--base-url", base),
        *("--model", "model", "--tokenizer", pair.target, "--dataset-name", "random"),
        *("--random-input-len", str(arguments.input), "--random-output-len", str(arguments.tokens)),
        *("--ignore-eos", "--num-prompts", str(requests), "--request-rate", str(rate)),
        *("--seed", "0", "--temperature", "0", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(result.parent), "--result-filename", result.name),
        *("--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | MODES["stock"])
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed: {done.stderr[-2000:]}")
    found = json.loads(result.read_text())
    return {name: found[name] for name in KEPT if name in found}


def answers(base: str) -> list[str]:
    """Greedy answers to the fixed prompts."""
    told = []
    for prompt in PROMPTS:
        body = {"model": "model", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        request = Request(f"{base}/v1/completions", json.dumps(body).encode())
        request.add_header("content-type", "application/json")
        with urlopen(request, timeout=60) as reply:
            told.append(json.load(reply)["choices"][0]["text"])
    return told


def metrics(base: str) -> dict[str, float]:
    """Our counters on /metrics, summed over labels; none in stock vLLM."""
    with urlopen(f"{base}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("nwor_") and sample.name.endswith("_total"):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def arguments_of(told: str | None) -> argparse.Namespace:
    """What server and load are to be; `told` says what the command does."""
    parser = argparse.ArgumentParser(description=told)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seconds", type=float, default=25, help="of each load")
    parser.add_argument("--input", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="to generate")
    parser.add_argument("--most", type=int, default=64, help="requests at once")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--flags", default="", help="further flags of vllm serve, in one string")
    return parser.parse_args()


def main() -> None:
    """Measure all modes."""
    arguments = arguments_of(__doc__)
    arguments.output.mkdir(parents=True, exist_ok=True)
    pair = resolve_pair(arguments.pair)
    rows: list[dict[str, Any]] = []
    capacity, stock_answers = 0.0, None
    for mode in arguments.modes:
        with server(pair, arguments, mode, arguments.output / f"{mode}.log") as base:
            told = answers(base)
            stock_answers = stock_answers or told
            bench(base, pair, arguments, float("inf"), arguments.most)  # warm-up
            if not capacity:
                load = bench(base, pair, arguments, float("inf"), 4 * arguments.most)
                capacity = load["request_throughput"]
                rows.append({"mode": mode, "load": "all at once", **load})
            for share in SHARES:
                rate = share * capacity
                load = bench(base, pair, arguments, rate, int(rate * arguments.seconds) + 1)
                same = told == stock_answers
                counted = metrics(base)
                rows.append({"mode": mode, "load": f"{share:.0%}", "rate": rate, **load,
                             "same_answers": same, **counted})  # fmt: skip
                pd.DataFrame(rows).to_csv(arguments.output / "serving.csv", index=False)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
