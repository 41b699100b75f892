r"""Do one state slot a request and rings of records pay? Engines beside each other on one GPU.

    python sweeps/studies/states/engines.py engines.csv --pair qwen3.5-27b-shape --requests 32 \
      --cache-gb 9.5 --stock-cache-gb 31 --dram ring-dram.csv \
      --engine-args '{"quantization": "fp8_per_tensor"}'

Stock's engine and one with rings. A round is one batch of each in random order, and of stock twice:
that is the noise. Prompts are random and the same for both engines of a round; drafts are accepted
as the pair says. The engine that waits runs nothing. Writes a row for each batch; prints ratios to
stock with 95 % intervals. With --dram, which needs a GPU whose counters may be read, then the bytes
of steps in which every request has a window, by the GPU's counters.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from nwor_bench.instruments.pm_sampling import METRICS, PmSampler, run_under_own_cupti
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.models.recurrent import recurrent_layers
from nwor_bench.stats.paired import paired_ratio

DRAFTS = 4
PROMPT = 64
SETTLED, COUNTED = 12, 80
"""Steps before those whose bytes are counted, in which the prompts end, and those."""
STAGE = {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "graph"}
ENGINES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "stock": ({"VLLM_PLUGINS": ""}, {}),
    "rings": (STAGE, {"nwor_state_slots": 1}),
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
        measure = bytes_of_steps if batch.dram else time_of_batch
        draw = random.Random(batch.number)
        prompts = [[draw.randrange(5, 60) for _ in range(PROMPT)] for _ in range(size)]
        pipe.send(measure(llm, [{"prompt_token_ids": ids} for ids in prompts], sampling))


class Batch(NamedTuple):
    """What an engine is asked for."""

    number: int
    """Decides the prompts."""
    dram: bool = False


def time_of_batch(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, float]:
    """Seconds, tokens and requests' windows of a whole batch."""
    before, start = windows_of(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"s": seconds, "tokens": tokens, "drafts": windows_of(llm) - before}


def bytes_of_steps(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, float]:
    """DRAM bytes of steps in which every request has a window, and its windows' tokens."""
    import torch
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    sampling.output_kind = RequestOutputKind.CUMULATIVE  # `generate` asks for the end only
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, sampling)

    def generated(steps: int) -> int:
        """Runs so many steps to their end; tokens so far."""
        answers = [engine.step() for _ in range(steps)]
        torch.cuda.synchronize()
        done = {each.request_id: each for answer in answers for each in answer}
        assert not any(each.finished for each in done.values()), "too few --tokens"
        return sum(len(each.outputs[0].token_ids) for each in done.values())

    before = generated(SETTLED)
    sampler = PmSampler()
    try:
        sampler.start()
        start = time.perf_counter()
        tokens = generated(COUNTED) - before
        samples = sampler.stop(time.perf_counter() - start)
    finally:
        sampler.close()
    while engine.has_unfinished_requests():
        engine.step()
    counted = dict(zip(METRICS, samples.values.sum(0) / COUNTED, strict=True))
    return {"steps": COUNTED, "tokens": tokens / COUNTED / len(prompts), **counted}


def predicted_bytes(pair: str, engine: str, requests: int, tokens: float) -> dict[str, float]:
    """Bytes of states that a step moves, as `nwor-bench plan` says, at so many tokens a window."""
    config = json.loads((Path(resolve_pair(pair).target) / "config.json").read_text())
    states = recurrent_layers(config)
    assert states is not None
    given = requests, DRAFTS, (tokens - 1) * requests
    moved = states.moved(*given[:2]) if engine == "stock" else states.with_rings(*given)
    return {"predicted_read": moved.read, "predicted_written": moved.written}


def windows_of(llm: Any) -> float:
    """Windows of requests so far, by vLLM's own counter."""
    values = (m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
    return float(sum(values))


def summary(table: pd.DataFrame) -> str:
    """Time of a request's window over stock's, round by round."""
    cost = table.assign(window=table.s / table.drafts).pivot(
        index="round", columns="engine", values="window"
    )
    lines = []
    for name in cost.columns.drop("stock"):
        ratio = paired_ratio(cost[name].tolist(), cost["stock"].tolist())
        lines.append(f"{name}: {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of stock")
    return "\n".join(lines)


def main() -> None:
    """Start the engines, one after the other, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--pair", default="qwen3.5-quarter-shape")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each request")
    parser.add_argument("--cache-gb", type=float, default=9.0, help="of each engine")
    parser.add_argument("--stock-cache-gb", type=float, help="of stock, if it is another")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further ones, JSON")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after, with the start")
    parser.add_argument("--dram", type=Path, help="count bytes too, three times; a CSV")
    arguments = parser.parse_args()
    if arguments.dram:
        run_under_own_cupti()
    began, spawn = time.monotonic(), multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in ENGINES:
        pipes[name], theirs = spawn.Pipe()
        spawn.Process(target=engine, args=(theirs, name, arguments), daemon=True).start()
    gpus = {pipe.recv() for pipe in pipes.values()}
    print(*gpus, f"engines started in {time.monotonic() - began:.0f} s", flush=True)
    setting = {"pair": arguments.pair, "weights": arguments.engine_args.get("quantization")}
    setting |= {"requests": arguments.requests, "gpu": " ".join(gpus)}
    setting["run"] = time.strftime("%Y-%m-%d %H:%M")
    rows: list[dict[str, Any]] = []
    for number in range(-1, arguments.rounds):  # the first is a warm-up
        order = [*ENGINES, "stock again"]
        for name in random.Random(number).sample(order, len(order)):
            pipe = pipes[name.split()[0]]
            pipe.send(Batch(number))
            rows.append({"round": number, "engine": name, **pipe.recv()})
        table = pd.DataFrame(rows)
        table = table[table["round"] >= 0].assign(**setting)
        table.to_csv(arguments.output, index=False, float_format="%.6g")
        if number > 1:
            print(number, summary(table), sep="\n", flush=True)
        if time.monotonic() - began > arguments.seconds:
            break
    counted = list[dict[str, Any]]()
    for number, (name, pipe) in product(range(3 if arguments.dram else 0), pipes.items()):
        pipe.send(Batch(number, dram=True))
        found = pipe.recv()
        said = predicted_bytes(arguments.pair, name, arguments.requests, found["tokens"])
        counted.append({"round": number, "engine": name, **found, **said, **setting})
        pd.DataFrame(counted).to_csv(arguments.dram, index=False, float_format="%.6g")
        print(counted[-1], flush=True)
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
