"""`vllm serve` in which draft counts alternate: answers of k = 0, times and tokens, refusals."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from server_tools import (
    DRAFTS,
    PROMPTS,
    Servers,
    complete,
    load,
    metrics_when,
    nwor_live,
    read_metrics,
    server,
    speculating,
    started,
)
from test_live_traffic import SURROUNDINGS, device, on

from nwor_bench.live.reading import Interleaved, Reading, reading_of
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.models.pairs.tiny import generate_tiny

__all__ = ["device"]

pytestmark = [pytest.mark.engine, pytest.mark.long]  # two servers

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
    flags = ("--max-num-seqs", "8", *flags)
    none = speculating(**speculation, num_speculative_tokens_per_batch_size=[[1, 8, 0]])
    own = {"VLLM_NWOR_DRAFTS": "interleave", **extra}
    with started(
        server(target, folder / "k_0.txt", *flags, *none, **extra),
        server(target, folder / "drafts.txt", *flags, *speculating(**speculation), **own),
    ) as addresses:
        yield Servers(*addresses)


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
    assert "Tokens/s over k =" in out
    assert "Windows: " in out


@on("cpu", "gpu")
@pytest.mark.row("vllm serve")
def test_draft_counts_alternate_with_the_answers_of_k_0(device: str, tmp_path: Path) -> None:
    """A draft model accepts some drafts; on the V2 runner it has one count, so an MTP layer drafts
    there. The command shows what the metrics say."""
    flags, extra = SURROUNDINGS[device]
    if device == "gpu":
        target, speculation = Path(resolve_pair("tiny-mtp").target), {"method": "mtp"}
    else:
        target, drafter = generate_tiny(tmp_path / "pair", noise=0.05)
        speculation = {"method": "draft_model", "drafter": drafter}
    with k_0_and_interleaved(tmp_path, target, speculation, *flags, **extra) as servers:
        check_draft_turns(servers)
        check_drafts_command(servers.staged, "host" if device == "cpu" else "device")


def test_two_ranks_measure_the_turns_of_one_scheduler(tmp_path: Path) -> None:
    target, drafter = generate_tiny(tmp_path / "pair", noise=0.05)
    flags = ("--max-num-seqs", "8", "--tensor-parallel-size", "2")
    flags += speculating("draft_model", drafter)
    extra = {"VLLM_NWOR_DRAFTS": "interleave", "VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    with server(target, tmp_path / "log.txt", *flags, **extra) as base:
        for prompt in FEW:
            complete(base, prompt, LONG)

        def counted(_: dict[str, float]) -> bool:
            first, second = (
                [
                    read_metrics(f"{base}/metrics", rank=rank, drafts=str(k)).get(name, 0.0)
                    for k in COUNTS
                    for name in ("nwor_drafts_windows_total", "nwor_drafts_groups_total")
                ]
                for rank in "01"
            )
            return first == second and min(first) > 0

        metrics_when(base, counted)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ngram", "--speculative-config: method: 'ngram' is invalid; only draft_model, eagle"),
        ("draft_model", "--max-num-seqs: 4 is invalid; "),
    ],
    ids=["method", "requests"],
)
def test_a_server_that_cannot_change_its_count_does_not_start(
    tmp_path: Path, method: str, words: str
) -> None:
    target, drafter = generate_tiny(tmp_path / "pair")
    more = {"prompt_lookup_max": 3, "prompt_lookup_min": 1} if method == "ngram" else {}
    given = speculating(method, None if more else drafter, **more)
    log = tmp_path / "log.txt"
    with (
        pytest.raises(AssertionError, match="the process has ended"),
        server(target, log, *given, VLLM_NWOR_DRAFTS="interleave"),
    ):
        pass
    assert words in log.read_text()
