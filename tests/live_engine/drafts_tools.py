"""What tests of a server whose draft counts alternate do, on a CPU and on a GPU alike."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from live_tools import metrics_when, nwor_live
from serve_tools import PROMPTS, Servers, load
from server_tools import DRAFTS, complete, read_metrics, server

from nwor_bench.live.reading import Interleaved, Reading, reading_of

COUNTS = range(DRAFTS + 1)
LONG = 300
"""Tokens of an answer that few prefills interrupt."""
FEW = PROMPTS[:4]
"""Prompts of such answers."""
ENOUGH = 10
"""Groups that an interval takes."""
LOADS = 40


@contextmanager
def k_0_and_interleaved(
    folder: Path, target: Path, speculation: dict[str, Any], *flags: str, **extra: str
) -> Iterator[Servers]:
    """One server as vLLM ships it, always at its own k = 0, one whose draft counts alternate."""
    given = {**speculation, "num_speculative_tokens": DRAFTS}
    none = {**given, "num_speculative_tokens_per_batch_size": [[1, 8, 0]]}
    flags = ("--max-num-seqs", "8", *flags)
    starting = [
        server(target, folder / "k_0.txt", *flags, *speculating(none), **extra),
        server(target, folder / "drafts.txt", *flags, *speculating(given),
               VLLM_NWOR_DRAFTS="interleave", **extra),
    ]  # fmt: skip
    with ExitStack() as stack, ThreadPoolExecutor() as side_by_side:
        yield Servers(*side_by_side.map(stack.enter_context, starting))


def speculating(config: dict[str, Any]) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


def drafts_shown(base: str) -> Reading:
    found = reading_of(urlopen(f"{base}/metrics", timeout=30).read().decode(), base)
    assert found.kind is Interleaved.DRAFTS
    return found


def check_draft_turns(servers: Servers) -> None:
    """Answers of k = 0, no request that fails, every count, and times and tokens of each."""
    base = servers.staged
    began = drafts_shown(base)
    assert list(began.windows.items()) == [(k, 0) for k in COUNTS]
    assert "nwor_drafts_info" not in read_metrics(f"{servers.stock}/metrics")
    plain = {prompt: complete(servers.stock, prompt) for prompt in PROMPTS}
    text = {prompt: complete(servers.stock, prompt, LONG) for prompt in FEW}
    drafted = read_metrics(f"{servers.stock}/metrics")["vllm:spec_decode_num_draft_tokens_total"]
    assert drafted == 0
    assert {prompt: complete(base, prompt) for prompt in PROMPTS} == plain
    finished = asyncio.run(load(base, 40))  # half of these are cancelled on the way
    assert len(finished) >= 20
    assert finished == [(prompt, plain[prompt]) for prompt, _ in finished]
    for _ in range(LOADS):
        assert {prompt: complete(base, prompt, LONG) for prompt in FEW} == text
        if drafts_shown(base).groups("1") > ENOUGH:
            break
    metrics_when(base, lambda _: drafts_shown(base).half_width("1") is not None)
    check_counts(base)


def check_counts(base: str) -> None:
    """Windows by count, their drafts as vLLM counts them, and what each count gives."""
    reading = drafts_shown(base)
    total = sum(reading.windows.values())
    assert all(0.1 < count / total < 0.35 for count in reading.windows.values())
    times = {k for k, own in reading.classes["1"].items() if own.ratio is not None}
    assert times == set(COUNTS)
    rates = reading.rates("1")
    tokens = [rates[k - 1].tokens or 0.0 for k in COUNTS if k]
    assert all(1 <= few <= most for few, most in zip(tokens, (2, 3, 4, 5), strict=True))
    assert all(rate.ratio and rate.ratio.low < rate.ratio.high for rate in rates)
    assert reading.worth().schedule[0][0] == 1


def check_drafts_command(base: str, clock: str) -> None:
    """`nwor-bench live` says what the metrics say."""
    code, out = nwor_live(base, "--json", "--time-budget", "2s")
    told = json.loads(out)
    assert code == 0
    assert {rate["drafts"] for rate in told["rates"]} == {1, 2, 3, 4}
    assert all(rate["ratio"] > 0 for rate in told["rates"] if rate["num_reqs"] == "1")
    assert told["best"]["1"] in COUNTS
    assert told["clock"] == clock
    code, out = nwor_live(base, "--time-budget", "1s")
    assert code == 0
    assert "Draft counts by batch size" in out
    assert "Windows: " in out
