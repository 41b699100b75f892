r"""Do rings of records pay in an engine? Engines beside each other on one GPU, one batch at a time.

    python sweeps/studies/states/engines.py engines.csv --pair qwen3.5-quarter-shape --requests 32
    python sweeps/studies/states/engines.py engines.csv --pair qwen3.5-27b-shape --requests 32 \
      --cache-gb 9 --stock-cache-gb 28 --engine-args '{"quantization": "fp8_per_tensor"}'

Three engines (or those of --engines): stock, one state slot a request with a commit in every
window, the same with rings. A round is one batch of each in random order, and of `slot` twice: that
is the noise. Prompts are random and the same for all engines of a round; drafts are accepted as the
pair says. The engines that wait run nothing. Writes a row for each batch; prints ratios to `slot`
with 95 % intervals.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pandas as pd

from nwor_bench.models.pairs import resolve_pair
from nwor_bench.stats.paired import paired_ratio

DRAFTS = 4
PROMPT = 64
STAGE = {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "graph"}
SLOT = {"nwor_state_slots": 1}  # with rings, unless they are left out
ENGINES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "stock": ({"VLLM_PLUGINS": ""}, {}),
    "slot": (STAGE, SLOT | {"nwor_state_rings": 0}),
    "rings": (STAGE, SLOT),
}
"""Variables and `additional_config` of each engine."""


def engine(pipe: Connection, name: str, arguments: argparse.Namespace) -> None:
    """One process: starts an engine, then answers each batch's number with what it took."""
    variables, additional = ENGINES[name]
    os.environ.update(variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    import torch
    from vllm import LLM, SamplingParams

    pair, size = resolve_pair(arguments.pair), arguments.requests
    graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    graphs["cudagraph_capture_sizes"] = [size * (DRAFTS + 1)]
    cache_gb = arguments.stock_cache_gb if name == "stock" else None
    llm = LLM(
        pair.target,
        speculative_config=pair.speculative_config(DRAFTS),
        load_format=pair.load_format or "auto",
        dtype=pair.dtype,
        additional_config={"gdn_prefill_backend": "triton"} | additional,
        compilation_config=graphs,
        kv_cache_memory_bytes=int(1e9 * (cache_gb or arguments.cache_gb)),
        gpu_memory_utilization=0.2,  # vLLM wants that much free as an engine starts
        max_num_seqs=size,
        max_num_batched_tokens=8192,
        max_model_len=2048,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        **arguments.engine_args,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=arguments.tokens, ignore_eos=True, detokenize=False
    )
    pipe.send(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    while (batch := pipe.recv()) is not None:
        draw = random.Random(batch)
        prompts = [[draw.randrange(5, 60) for _ in range(PROMPT)] for _ in range(size)]
        before, start = windows_of(llm), time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        pipe.send({"s": seconds, "tokens": tokens, "drafts": windows_of(llm) - before})


def windows_of(llm: Any) -> float:
    """Windows of requests so far, by vLLM's own counter."""
    values = (m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
    return float(sum(values))


def summary(table: pd.DataFrame) -> str:
    """Time of a request's window over that of `slot`, round by round."""
    cost = table.assign(window=table.s / table.drafts).pivot(
        index="round", columns="engine", values="window"
    )
    lines = []
    for name in cost.columns.drop("slot"):
        ratio = paired_ratio(cost[name].tolist(), cost["slot"].tolist())
        lines.append(f"{name}: {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of slot")
    return "\n".join(lines)


def main() -> None:
    """Start the engines, one after the other, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--pair", default="qwen3.5-quarter-shape")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each request")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cache-gb", type=float, default=9.0, help="of each engine")
    parser.add_argument("--stock-cache-gb", type=float, help="of stock, if it is another")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further ones, JSON")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after, with the start")
    arguments = parser.parse_args()
    began, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in arguments.engines:
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=engine, args=(theirs, name, arguments), daemon=True).start()
    gpus = {pipe.recv() for pipe in pipes.values()}
    print(*gpus, f"engines started in {time.monotonic() - began:.0f} s", flush=True)
    setting = {"pair": arguments.pair, "weights": arguments.engine_args.get("quantization")}
    setting |= {"requests": arguments.requests, "gpu": " ".join(gpus)}
    rows: list[dict[str, Any]] = []
    for number in range(-1, arguments.rounds):  # the first is a warm-up
        order = [*arguments.engines, "slot again"]
        for name in random.Random(number).sample(order, len(order)):
            pipe = pipes[name.split()[0]]
            pipe.send(number)
            rows.append({"round": number, "engine": name, **pipe.recv()})
        table = pd.DataFrame(rows)
        table = table[table["round"] >= 0].assign(**setting)
        table.to_csv(arguments.output, index=False, float_format="%.6g")
        if number > 1:
            print(number, summary(table), sep="\n", flush=True)
        if time.monotonic() - began > arguments.seconds:
            break
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
