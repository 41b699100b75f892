"""Two servers of one model, and what their tests do: the stock answers, also after a load."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from server_tools import DRAFTS, complete, read_metrics, server

from nwor_bench.models.pairs.tiny import generate_tiny

if TYPE_CHECKING:  # a machine without it can still collect the tests
    import httpx

PROMPTS = [f"{word} two {word} two {word * n} two" for n, word in enumerate("abcdefghijkl", 1)]
REQUESTS = 200


@dataclass(frozen=True)
class Servers:
    """Addresses of two servers of one model."""

    stock: str
    staged: str


EXTENSION = "nwor_bench.plugin.worker.NworWorkerExtension"


@contextmanager
def stock_and_staged(
    folder: Path,
    *flags: str,
    nwor_mode: str = "stage",
    extension: str = EXTENSION,
    draft_model: bool = False,
    **extra: str,
) -> Iterator[Servers]:
    """One server as vLLM ships it, without the plugin, and one that stages.

    `flags` and `extra` (environment variables) are for both.
    """
    target, drafter = generate_tiny(folder / "pair", noise=0.05)
    if draft_model:
        flags += drafting_with(drafter)
    starting = [
        server(target, folder / "stock.txt", *flags, **extra),
        staging(target, folder / "staged.txt", nwor_mode, extension, *flags, **extra),
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as side_by_side:
        yield Servers(*side_by_side.map(stack.enter_context, starting))


def staging(
    target: Path, log: Path, nwor_mode: str, extension: str, *flags: str, **extra: str
) -> AbstractContextManager[str]:
    """A server in that mode whose worker answers questions."""
    extended = ("--worker-extension-cls", extension)
    modes = {"VLLM_NWOR_MODE": nwor_mode, "VLLM_SCV_MODE": "graph", "VLLM_SERVER_DEV_MODE": "1"}
    if nwor_mode == "stage":
        modes["VLLM_NWOR_BESIDE_PREFILL"] = "stage"  # a load is to stage all that it can
    return server(target, log, *flags, *extended, **modes, **extra)


def drafting_with(drafter: Path) -> tuple[str, str]:
    """Flags for a draft model: with one each step behind a prefill is a window."""
    config = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": DRAFTS}
    return "--speculative-config", json.dumps(config)


def ask_worker(base: str, method: str, *arguments: Any) -> Any:
    """What the worker says through vLLM's development endpoint."""
    body = json.dumps({"method": method, "args": list(arguments)}).encode()
    request = Request(f"{base}/collective_rpc", body, {"content-type": "application/json"})
    return json.loads(urlopen(request, timeout=60).read())["results"][0]


def check_answers(servers: Servers) -> None:
    """Greedy answers are alike, and the staging server staged."""
    stock = [complete(servers.stock, prompt) for prompt in PROMPTS]
    assert "nwor_windows_total" not in read_metrics(f"{servers.stock}/metrics")
    before = read_metrics(f"{servers.staged}/metrics")["nwor_total_staged_total"]
    assert [complete(servers.staged, prompt) for prompt in PROMPTS] == stock
    assert read_metrics(f"{servers.staged}/metrics")["nwor_total_staged_total"] > before


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


def wait_until_idle(base: str) -> None:
    """vLLM takes cancelled requests out of its queues a little later."""
    deadline = time.monotonic() + 60
    queues = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while any(read_metrics(f"{base}/metrics")[name] for name in queues):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def check_load(servers: Servers) -> None:
    """A load of which every second request may be cancelled leaves nothing behind.

    Greedy and sampled requests apart: where they share a batch, stock vLLM 0.32 samples the
    greedy ones too on a CPU as soon as it speculates.
    """
    stock = {prompt: complete(servers.stock, prompt) for prompt in PROMPTS}
    finished = asyncio.run(load(servers.staged, REQUESTS))
    assert len(finished) >= REQUESTS // 2
    assert finished == [(prompt, stock[prompt]) for prompt, _ in finished]
    asyncio.run(load(servers.staged, REQUESTS // 4, temperature=0.9))
    wait_until_idle(servers.staged)
    assert ask_worker(servers.staged, "nwor_window_state") == "idle"
    assert {prompt: complete(servers.staged, prompt) for prompt in PROMPTS} == stock
    samples = read_metrics(f"{servers.staged}/metrics")
    assert samples["nwor_total_staged_total"] == samples["nwor_draft_tokens_total"] > 0
    settled = samples["nwor_total_committed_total"] + samples["nwor_total_rejected_total"]
    assert samples["nwor_total_staged_total"] == settled
    assert samples["nwor_total_committed_total"] == samples["nwor_accepted_tokens_total"]
    assert samples.get("nwor_fallback_count_total", 0) == 0
