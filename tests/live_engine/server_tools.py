"""vLLM's API server, and processes that end with their test."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

from prometheus_client.parser import text_string_to_metric_families

CHECKOUT = Path(__file__).resolve().parents[2]
START_S = 400
DRAFTS = 4
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what an earlier engine left in it, and with the checkout first."""
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

    The command `vllm` of the CPU build looks for a distribution called vllm and fails.
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
