r"""Do one state slot a request and rings of records pay? Engines beside each other on one GPU.

    python sweeps/studies/states/engines.py engines.csv --pair qwen3.5-27b-shape --requests 32 \
      --cache-gb 9.5 --stock-cache-gb 31 --dram ring-dram.csv \
      --engine-args '{"quantization": "fp8_per_tensor"}'
    python sweeps/studies/states/engines.py engines.csv --pair qwen3.5-27b-shape --requests 80 64 \
      --cache-gb 21.5 --stock-cache-gb 75 \
      --engine-args '{"quantization": "fp8_per_tensor", "enable_cumem_allocator": true}'

Stock's engine and one with rings. A round is, for each number of requests, one batch of each in
random order, and of stock twice: that is the noise. Prompts are random and the same for both
engines of a round; drafts are accepted as the pair says. The engine that waits runs nothing. Where
both caches do not fit, with vLLM's `enable_cumem_allocator`, it has no cache either: only the
weights stay. Writes a row for each batch; prints ratios to stock with 95 % intervals. With --dram,
which needs a GPU whose counters may be read, then the bytes of steps in which every request has a
window, by the GPU's counters.
"""

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
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

    pair, sizes = resolve_pair(arguments.pair), arguments.requests
    graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    graphs["cudagraph_capture_sizes"] = sorted(size * (DRAFTS + 1) for size in sizes)
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
        max_num_seqs=max(sizes),
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
    lend = arguments.engine_args.get("enable_cumem_allocator", False)
    if lend:
        cache().discard("kv_cache")
    pipe.send(torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    while (batch := pipe.recv()) is not None:
        if lend:
            cache().wake_up(["kv_cache"])
        draw = random.Random(batch.round)
        prompts = [[draw.randrange(5, 60) for _ in range(PROMPT)] for _ in range(batch.requests)]
        found = batch.measure(llm, [{"prompt_token_ids": ids} for ids in prompts], sampling)
        if lend:
            cache().discard("kv_cache")
        pipe.send(found)


def cache() -> Any:
    """vLLM's allocator, which gives the memory of a cache back and takes it again."""
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


class Batch(NamedTuple):
    """What an engine is asked for."""

    measure: Callable[..., dict[str, float]]
    round: int
    """Decides the prompts."""
    requests: int


def warm_up(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, float]:
    """A batch that is not counted; a cache without room for all its requests at once is refused."""
    done = Steps(llm, prompts, sampling)
    done.run(SETTLED)
    assert done.at_once == len(prompts), f"room for {done.at_once} of {len(prompts)} requests"
    done.run_to_end()
    return {}


def time_of_batch(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, float]:
    """Seconds, tokens and requests' windows of a whole batch."""
    before, start = windows_of(llm), time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"s": seconds, "tokens": tokens, "drafts": windows_of(llm) - before}


def bytes_of_steps(llm: Any, prompts: list[Any], sampling: Any) -> dict[str, float]:
    """DRAM bytes of steps in which every request has a window, and its windows' tokens."""
    done = Steps(llm, prompts, sampling)
    before = done.run(SETTLED)
    sampler = PmSampler()
    try:
        sampler.start()
        start = time.perf_counter()
        tokens = done.run(COUNTED) - before
        samples = sampler.stop(time.perf_counter() - start)
    finally:
        sampler.close()
    done.run_to_end()
    counted = dict(zip(METRICS, samples.values.sum(0) / COUNTED, strict=True))
    return {"steps": COUNTED, "tokens": tokens / COUNTED / len(prompts), **counted}


class Steps:
    """An engine that is led through a batch step by step."""

    def __init__(self, llm: Any, prompts: list[Any], sampling: Any) -> None:
        from vllm.sampling_params import RequestOutputKind

        self.engine, sampling = llm.llm_engine, sampling.clone()
        sampling.output_kind = RequestOutputKind.CUMULATIVE  # `generate` asks for the end only
        for number, prompt in enumerate(prompts):
            self.engine.add_request(str(number), prompt, sampling)

    def run(self, steps: int) -> int:
        """Runs so many steps to their end; tokens so far."""
        import torch

        answers = [self.engine.step() for _ in range(steps)]
        torch.accelerator.synchronize()
        self.at_once = max(len(answer) for answer in answers)
        done = {each.request_id: each for answer in answers for each in answer}
        assert not any(each.finished for each in done.values()), "too few --tokens"
        return sum(len(each.outputs[0].token_ids) for each in done.values())

    def run_to_end(self) -> None:
        """Runs what is left."""
        while self.engine.has_unfinished_requests():
            self.engine.step()


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
    lines = []
    for requests, rows in table.assign(window=table.s / table.drafts).groupby("requests"):
        cost = rows.pivot(index="round", columns="engine", values="window")
        for name in cost.columns.drop("stock"):
            ratio = paired_ratio(cost[name].tolist(), cost["stock"].tolist())
            interval = f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
            lines.append(f"{requests} requests, {name}: {interval} of stock")
    return "\n".join(lines)


def main() -> None:
    """Start the engines, one after the other, and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--pair", default="qwen3.5-quarter-shape")
    parser.add_argument("--requests", type=int, nargs="+", default=[32])
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
        if arguments.engine_args.get("enable_cumem_allocator"):
            pipes[name].poll(None)  # until its cache is gone again
    gpus = {pipe.recv() for pipe in pipes.values()}
    print(*gpus, f"engines started in {time.monotonic() - began:.0f} s", flush=True)
    setting = {"pair": arguments.pair, "weights": arguments.engine_args.get("quantization")}
    setting |= {"gpu": " ".join(gpus), "run": time.strftime("%Y-%m-%d %H:%M")}

    def ask(name: str, batch: Batch) -> dict[str, Any]:
        """A row: what one engine says of a batch."""
        pipe = pipes[name.split()[0]]
        pipe.send(batch)
        return {"round": batch.round, "engine": name, "requests": batch.requests, **pipe.recv()}

    for name, size in product(ENGINES, arguments.requests):
        ask(name, Batch(warm_up, -1, size))
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for size in arguments.requests:
            order = [*ENGINES, "stock again"]
            for name in random.Random(number).sample(order, len(order)):
                rows.append(ask(name, Batch(time_of_batch, number, size)))
        table = pd.DataFrame(rows).assign(**setting)
        table.to_csv(arguments.output, index=False, float_format="%.6g")
        if number > 1:
            print(number, summary(table), sep="\n", flush=True)
        if time.monotonic() - began > arguments.seconds:
            break
    counted = list[dict[str, Any]]()
    for number, size, name in product(range(3 * bool(arguments.dram)), arguments.requests, ENGINES):
        found = ask(name, Batch(bytes_of_steps, number, size))
        said = predicted_bytes(arguments.pair, name, size, found["tokens"])
        counted.append({**found, **said, **setting})
        pd.DataFrame(counted).to_csv(arguments.dram, index=False, float_format="%.6g")
        print(counted[-1], flush=True)
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
