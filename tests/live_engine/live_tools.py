"""What tests of a server in which off and stage are interleaved do, on a CPU and on a GPU alike."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from serve_tools import (
    PROMPTS,
    Servers,
    ask_worker,
    load,
    stock_and_staged,
)
from server_tools import DRAFTS, complete, environment, read_metrics

HERE = str(Path(__file__).parent)
RATIOS = ("nwor_live_ratio_low", "nwor_live_ratio", "nwor_live_ratio_high")
LOADS = 20
ENOUGH = 10
"""Groups that an interval takes."""


INTERLEAVED_CELLS = {"nwor_mode": "interleave", "extension": "planted_live.PlantedWorker"}
"""The modes are interleaved, and the worker can go wrong."""

FINDS_WORKER = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{HERE}"}


@contextmanager
def stock_and_interleaved(folder: Path, *flags: str, **extra: str) -> Iterator[Servers]:
    """One server as vLLM ships it, one whose modes are interleaved."""
    extra = FINDS_WORKER | extra
    with stock_and_staged(
        folder, *flags, **INTERLEAVED_CELLS, draft_model=True, **extra
    ) as started:
        yield started


def stock_answers(servers: Servers) -> dict[str, str]:
    return {prompt: complete(servers.stock, prompt) for prompt in PROMPTS}


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


def counts_agree(found: dict[str, float]) -> bool:
    """Our counts are vLLM's, which leave out the last window of an answer if it ran ahead of it."""
    ours, theirs = (
        [found[f"{prefix}{count}_tokens_total"] for count in ("draft", "accepted")]
        for prefix in ("nwor_", "vllm:spec_decode_num_")
    )
    ahead = [a - b for a, b in zip(ours, theirs, strict=True)]
    return min(theirs) > 0 and all(0 <= more <= DRAFTS * len(PROMPTS) for more in ahead)


def fallbacks(base: str) -> dict[str, float]:
    """Windows of a server that were written directly, by reason; reasons of none left out."""
    text = urlopen(f"{base}/metrics", timeout=30).read().decode()
    samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
    found = {s.labels["reason"]: s.value for s in samples if s.name == "nwor_fallback_count_total"}
    return {reason: value for reason, value in found.items() if value}


def check_interleaved(servers: Servers, stock: dict[str, str]) -> None:
    """The stock answers, both modes, counts that add up, and a ratio with its interval."""
    base = servers.staged
    began = read_metrics(f"{base}/metrics")
    assert began["nwor_live_groups_total"] == 0
    assert "nwor_live_ratio" not in began
    assert {prompt: complete(base, prompt) for prompt in PROMPTS} == stock
    metrics_when(base, counts_agree)
    for _ in range(LOADS):  # half of these are cancelled on the way
        finished = asyncio.run(load(base, 40))
        assert len(finished) >= 20  # all that nobody cut off: none failed
        assert finished == [(prompt, stock[prompt]) for prompt, _ in finished]
        # One at a time few prefills come between: most groups that count are of these.
        assert {prompt: complete(base, prompt) for prompt in PROMPTS} == stock
        groups = read_metrics(f"{base}/metrics", num_reqs="all")["nwor_live_groups_total"]
        if groups >= ENOUGH:
            break
    found = metrics_when(base, lambda found: "nwor_live_ratio" in found)
    low, ratio, high = (found[name] for name in RATIOS)
    assert 0 < low < ratio < high
    assert found["nwor_live_groups_total"] >= 10
    staged = found["nwor_total_staged_total"]
    assert 0.2 < staged / found["nwor_draft_tokens_total"] < 0.8
    assert staged == found["nwor_total_committed_total"] + found["nwor_total_rejected_total"]
    assert found["nwor_live_staging_stopped_total"] == 0


def check_command(servers: Servers, clock: str) -> None:
    """`nwor-bench live` says what the metrics say, and what the stock server lacks."""
    code, out = nwor_live(servers.staged, "--json", "--time-budget", "2s")
    told = json.loads(out)
    assert code == 0
    assert told["classes"][-1]["num_reqs"] == "all"
    assert told["classes"][-1]["ratio"] > 0
    assert told["clock"] == clock
    code, out = nwor_live(servers.stock)
    assert code == 2
    assert "VLLM_NWOR_MODE=interleave" in out


def check_stops(base: str, stock: dict[str, str] | None, fault: str, reason: str) -> None:
    """Plant a fault: staging stops for good, and every answer stays right.

    `stock` is None for a fault that loses committed tokens: answers are then not compared.
    """
    ask_worker(base, "plant", fault)

    def answers() -> dict[str, str] | None:
        found = {prompt: complete(base, prompt) for prompt in PROMPTS}
        return None if stock is None else found

    assert answers() == stock

    def stopped(_: dict[str, float]) -> bool:
        if stock is None:
            answers()  # the alarm is told in the next staged window
        found = read_metrics(f"{base}/metrics", reason=reason)
        return found.get("nwor_live_staging_stopped_total") == 1

    before = metrics_when(base, stopped)
    assert answers() == stock
    assert len(asyncio.run(load(base, 20))) >= 10
    after = metrics_when(
        base, lambda found: found["nwor_windows_total"] > before["nwor_windows_total"]
    )
    assert after["nwor_total_staged_total"] == before["nwor_total_staged_total"]
    assert after["nwor_live_staging_stopped_total"] == 1
    code, out = nwor_live(base, "-q")
    assert code == 3
    assert reason in out
    assert "goes on" in " ".join(out.split())
