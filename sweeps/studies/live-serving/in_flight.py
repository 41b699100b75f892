r"""Does a server gain anything? Servers on one GPU with the same requests, in turns.

    python sweeps/studies/live-serving/in_flight.py --requests 64 --output DIR
    python sweeps/studies/live-serving/in_flight.py --requests 64 256 --output DIR \
      --pair qwen3.5-quarter-shape --modes stock rings \
      --additional-config '{"gdn_prefill_backend": "triton"}'
    VLLM_USE_V2_MODEL_RUNNER=0 python sweeps/studies/live-serving/in_flight.py --pair tiny \
      --requests 4 --tokens 64 --input 32 --blocks 4 --seconds 2 --output DIR --flags \
      "--kv-cache-memory-bytes 50000000 --enforce-eager --block-size 32"            # without a GPU

A server for each mode, all up at once, so that their caches must fit side by side. All are loaded
and all but one are paused (vLLM's `/pause?mode=keep`, which freezes their requests): each runs for
a few seconds, in random order, so what drifts on the host meets all alike. So many requests are
always in flight: one that ends is followed by the next. Prompts are random, outputs have half to
one and a half times --tokens; the servers get the same ones. Counted are the seconds behind the
first of a turn, by the server's own /metrics. Writes in_flight.csv, a row for each turn.
"""

import argparse
import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.models.pairs import ResolvedPair, resolve_pair
from nwor_bench.records.fallback_reasons import BESIDE_PREFILL
from nwor_bench.stats.paired import paired_ratio

STAGE = {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "adaptive"}
MODES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "stock": ({"VLLM_PLUGINS": ""}, {}),
    "stage": (STAGE, {}),
    "beside": (STAGE | {"VLLM_NWOR_BESIDE_PREFILL": "stage"}, {}),
    "rings": (STAGE, {"nwor_state_slots": 1}),
    "interleave": ({"VLLM_NWOR_MODE": "interleave"}, {}),
}
"""Variables and `additional_config` of each server."""
START_S = 400
FIRST_S = 0.5
"""Seconds at a turn's begin that are not counted."""
DRAFTS = 4
COUNTED = {
    "tokens": "vllm:generation_tokens_total",
    "ended": "vllm:request_time_per_output_token_seconds_count",
    "begun": "vllm:time_to_first_token_seconds_count",
    "preempted": "vllm:num_preemptions_total",
    "windows": "nwor_windows_total",
    "beside_prefill": "beside_prefill",
    "other_fallbacks": "nwor_fallback_count_total",
}


class Server(NamedTuple):
    """A process of vLLM's API server, and where it answers."""

    base: str
    child: subprocess.Popen[bytes]


@contextmanager
def server(
    pair: ResolvedPair, arguments: argparse.Namespace, mode: str, number: int
) -> Iterator[Server]:
    """vLLM's API server in this mode, which may not have started yet."""
    mode_variables, additional = MODES[mode]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", pair.target),
        *("--served-model-name", "model", "--port", str(arguments.port + number)),
        *("--dtype", pair.dtype, "--max-model-len", "2048", "--no-enable-prefix-caching"),
        *("--max-num-seqs", str(max(arguments.requests)), "--disable-uvicorn-access-log"),
        *("--speculative-config", json.dumps(pair.speculative_config(DRAFTS))),
        *("--gpu-memory-utilization", f"{0.9 / len(arguments.modes):.2f}"),  # vLLM wants it free
        *(("--load-format", pair.load_format) if pair.load_format else ()),
        *("--additional-config", json.dumps(arguments.additional_config | additional)),
        *shlex.split(arguments.flags),
    ]
    with (arguments.output / f"{mode}.log").open("wb") as log:
        variables = os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | mode_variables  # can be paused
        child = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
    try:
        yield Server(f"http://127.0.0.1:{arguments.port + number}", child)
    finally:
        child.terminate()
        child.wait(60)


async def wait_for(server: Server) -> None:
    """Return when it answers; raises RuntimeError if it has ended, or does not start in START_S."""
    deadline = time.monotonic() + START_S
    async with httpx.AsyncClient() as client:
        while time.monotonic() < deadline and server.child.poll() is None:
            try:
                if (await client.get(f"{server.base}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError(f"{server.base} did not start; see its log")


async def counts(client: httpx.AsyncClient, base: str) -> dict[str, float]:
    """The counters that the server has, summed over labels, and the time of reading."""
    text = (await client.get(f"{base}/metrics")).text
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            beside = sample.labels.get("reason") == BESIDE_PREFILL
            name = "beside_prefill" if beside else sample.name
            sums[name] = sums.get(name, 0.0) + sample.value
    counted = {name: sums[key] for name, key in COUNTED.items() if key in sums}
    return counted | {"s": time.perf_counter()}


@asynccontextmanager
async def loaded(
    client: httpx.AsyncClient, base: str, requests: int, arguments: argparse.Namespace
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """So many streams of requests, each one after the other; cancelled at the end."""

    async def one_after_another(number: int) -> None:
        draw = random.Random(f"{number} {requests}")
        share = draw.uniform(0.1, 1.5)  # requests do not all end at once
        while True:
            prompt = [draw.randrange(5, 60) for _ in range(arguments.input)]
            length = max(int(share * arguments.tokens), 1)
            body = {"model": "model", "prompt": prompt, "max_tokens": length, "temperature": 0}
            body |= {"ignore_eos": True}
            reply = await client.post(f"{base}/v1/completions", json=body)
            reply.raise_for_status()
            share = draw.uniform(0.5, 1.5)

    streams = [asyncio.create_task(one_after_another(number)) for number in range(requests)]
    try:
        yield streams
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def pause(client: httpx.AsyncClient, base: str) -> None:
    """Freeze a server's requests, and those that come."""
    how = {"mode": "keep", "clear_cache": "false"}
    (await client.post(f"{base}/pause", params=how)).raise_for_status()


async def resume(client: httpx.AsyncClient, base: str) -> None:
    """Let a paused server go on."""
    (await client.post(f"{base}/resume")).raise_for_status()


async def turn(client: httpx.AsyncClient, base: str, seconds: float) -> dict[str, float]:
    """Changes of the counters over so many seconds of a server's turn."""
    await resume(client, base)
    await asyncio.sleep(FIRST_S)
    before = await counts(client, base)
    await asyncio.sleep(seconds)
    after = await counts(client, base)
    await pause(client, base)
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def row_of(place: dict[str, Any], change: dict[str, float]) -> dict[str, Any]:
    """One row of in_flight.csv."""
    speed = change["tokens"] / change["s"]
    return {**place, "tokens_per_s": speed, "tpot_ms": 1e3 * place["requests"] / speed, **change}


def summary(table: pd.DataFrame) -> str:
    """Each mode over stock, paired by block."""
    lines = []
    for (requests, mode), rows in table[table["mode"] != "stock"].groupby(["requests", "mode"]):
        stock = table[(table["mode"] == "stock") & (table.requests == requests)].set_index("block")
        rows = rows[rows.block.isin(stock.index)].set_index("block")
        base = stock.loc[rows.index, "tokens_per_s"]
        ratio = paired_ratio(rows["tokens_per_s"].tolist(), base.tolist())
        said = f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] of {base.median():.5g}"
        lines.append(f"{requests} {mode}: {said} tokens/s, {len(rows)} blocks")
    return "\n".join(lines)


async def measure(servers: dict[str, Server], arguments: argparse.Namespace) -> None:
    """Load all servers, and give each its turns."""
    await asyncio.gather(*(wait_for(server) for server in servers.values()))
    rows: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=3600) as client:
        for requests in arguments.requests:
            async for row in turns(client, servers, requests, arguments):
                rows.append(row)
                table = pd.DataFrame(rows)
                table.to_csv(arguments.output / "in_flight.csv", index=False, float_format="%.6g")
                if row["block"] > 1 and len(rows) % len(servers) == 0:
                    print(row["block"], summary(table), sep="\n", flush=True)


async def turns(
    client: httpx.AsyncClient,
    servers: dict[str, Server],
    requests: int,
    arguments: argparse.Namespace,
) -> AsyncIterator[dict[str, Any]]:
    """Rows of one size, turn by turn; each server first has --ramp seconds that do not count."""
    bases = {mode: server.base for mode, server in servers.items()}
    await asyncio.gather(*(pause(client, base) for base in bases.values()))
    async with AsyncExitStack() as load:
        streams: list[asyncio.Task[None]] = []
        for base in bases.values():
            streams += await load.enter_async_context(loaded(client, base, requests, arguments))
        for base in bases.values():
            await turn(client, base, arguments.ramp)
        for block in range(arguments.blocks):
            for mode in random.Random(block).sample(list(bases), len(bases)):
                change = await turn(client, bases[mode], arguments.seconds)
                failed = [task.exception() for task in streams if task.done()]
                assert not failed, failed
                place = {"pair": arguments.pair, "requests": requests, "mode": mode, "block": block}
                yield row_of(place, change)
    for base in bases.values():
        await resume(client, base)


def main() -> None:
    """Start the servers and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pair", default="llama-3b-shape")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["stock", "stage"])
    parser.add_argument("--requests", type=int, nargs="+", default=[64], help="in flight")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--ramp", type=float, default=5.0, help="seconds before the first turn")
    parser.add_argument("--seconds", type=float, default=3.0, help="counted in a turn")
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=768, help="to generate, on average")
    parser.add_argument("--port", type=int, default=8123, help="of the first server")
    parser.add_argument("--additional-config", type=json.loads, default={}, help="of all, JSON")
    parser.add_argument("--flags", default="", help="further flags of vLLM's server, in one string")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    pair = resolve_pair(arguments.pair)
    with ExitStack() as up:
        servers = {
            mode: up.enter_context(server(pair, arguments, mode, number))
            for number, mode in enumerate(arguments.modes)
        }
        asyncio.run(measure(servers, arguments))


if __name__ == "__main__":
    main()
