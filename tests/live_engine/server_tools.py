"""vLLM's API servers, processes that end with their test, and loads of requests."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:  # a machine without it can still collect the tests
    import httpx

CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 400
DRAFTS = 4
PROMPTS = [f"{word} two {word} two {word * n} two" for n, word in enumerate("abcdefghijkl", 1)]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def environment(**extra: str) -> dict[str, str]:
    """Variables of the test process: nothing of earlier engines, and the checkout first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    path = ":".join(filter(None, (str(CHECKOUT), f"{CHECKOUT}/kernels", kept.get("PYTHONPATH"))))
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **extra,
    }


@contextmanager
def process(command: list[str], log: Path, **extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is gone when the block ends."""
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(**extra)
        )
        try:
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(60)


def wait_for(
    child: subprocess.Popen[bytes], log: Path, what: str, ready: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_S
    while not ready():
        assert child.poll() is None, f"{what}: the process has ended\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"{what}: not in {START_S} s\n{log.read_text()[-4000:]}"
        time.sleep(0.2)


def read_metrics(address: str, **labels: str) -> dict[str, float]:
    """Sums over all samples with these labels, by name; parsed by the client's own parser."""
    text = urlopen(address, timeout=30).read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(target: Path, log: Path, *flags: str, **extra: str) -> Iterator[str]:
    """vLLM's API server, as `vllm serve` starts it: engine core and worker are other processes.

    `flags` come after our own, `extra` are environment variables.

    Without `make venv` the command `vllm` of the CPU build does not find its version and fails.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "4"),
        *("--block-size", "32", "--kv-cache-memory-bytes", "20000000", "--enforce-eager"),
        *("--speculative-config", json.dumps(NGRAM)),
        *flags,
    ]
    base = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            return bool(urlopen(f"{base}/health", timeout=5).status == 200)
        except (URLError, ConnectionError):
            return False

    with process(command, log, **extra) as child:
        wait_for(child, log, "the server", is_up)
        yield base


def complete(base: str, prompt: str, tokens: int = 40) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    request = Request(
        f"{base}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return str(json.loads(urlopen(request, timeout=60).read())["choices"][0]["text"])


@dataclass(frozen=True)
class Servers:
    """Addresses of two servers of one model; `stock` is empty if there is only the other one."""

    stock: str
    staged: str


@contextmanager
def started(*starting: AbstractContextManager[str]) -> Iterator[list[str]]:
    """Servers that are started side by side."""
    with ExitStack() as stack, ThreadPoolExecutor() as side_by_side:
        yield list(side_by_side.map(stack.enter_context, starting))


def speculating(method: str, drafter: Path | None = None, **more: Any) -> tuple[str, str]:
    """Flags for DRAFTS drafts by this method; with a draft model each step behind a prefill is a
    window."""
    named = {} if drafter is None else {"model": str(drafter)}
    config = {"method": method, **named, "num_speculative_tokens": DRAFTS, **more}
    return "--speculative-config", json.dumps(config)


def ask_worker(base: str, method: str, *arguments: Any) -> Any:
    """What the worker says through vLLM's development endpoint."""
    body = json.dumps({"method": method, "args": list(arguments)}).encode()
    request = Request(f"{base}/collective_rpc", body, {"content-type": "application/json"})
    return json.loads(urlopen(request, timeout=60).read())["results"][0]


async def stream(
    client: "httpx.AsyncClient", base: str, number: int, temperature: float
) -> tuple[str, str | None]:
    """One streamed request; every second one hangs up after some chunks.

    Returns the prompt, and the text where the request was not cut off.
    """
    prompt = PROMPTS[number % len(PROMPTS)]
    hang_up = random.Random(number).randrange(12) if number % 2 else None
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "stream": True}
    body |= {"temperature": temperature}
    pieces: list[str] = []
    async with client.stream("POST", f"{base}/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if hang_up is not None and len(pieces) >= hang_up:
                return prompt, None
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                pieces.append(json.loads(data)["choices"][0]["text"])
    return prompt, "".join(pieces)


async def load(base: str, requests: int, temperature: float = 0.0) -> list[tuple[str, str]]:
    """All requests at once; the answers of those that were not cut off."""
    import httpx

    limits = httpx.Limits(max_connections=requests)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        streams = (stream(client, base, number, temperature) for number in range(requests))
        answers = await asyncio.gather(*streams)
    return [(prompt, text) for prompt, text in answers if text is not None]


def metrics_when(base: str, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Sums of all samples, but only of the class `all` if there are classes; once ready."""
    deadline = time.monotonic() + 60
    while True:
        every = read_metrics(f"{base}/metrics")
        found = every | read_metrics(f"{base}/metrics", num_reqs="all")
        if ready(found):
            return found
        assert time.monotonic() < deadline, {k: v for k, v in found.items() if "nwor" in k}
        time.sleep(0.2)


def nwor_live(base: str, *flags: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = [sys.executable, "-m", "nwor_bench", "live", base, *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr
