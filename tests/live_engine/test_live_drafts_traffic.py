"""`vllm serve` in which draft counts alternate: answers of k = 0, times and tokens, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafts_tools import (
    COUNTS,
    FEW,
    LONG,
    check_draft_turns,
    check_drafts_command,
    k_0_and_interleaved,
    speculating,
)
from live_tools import metrics_when
from serve_tools import Servers, drafting_with
from server_tools import NGRAM, complete, read_metrics, server

from nwor_bench.models.pairs.tiny import generate_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]  # two servers


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """vLLM's own k = 0, and draft counts that alternate; a draft model accepts some drafts."""
    folder = tmp_path_factory.mktemp("drafts")
    target, drafter = generate_tiny(folder / "pair", noise=0.05)
    speculation = {"method": "draft_model", "model": str(drafter)}
    with k_0_and_interleaved(folder, target, speculation) as started:
        yield started


@pytest.mark.row("vllm serve")
def test_draft_counts_alternate_with_the_answers_of_k_0(servers: Servers) -> None:
    check_draft_turns(servers)


def test_the_command_shows_them(servers: Servers) -> None:
    check_drafts_command(servers.staged, "host")


def test_two_ranks_measure_the_turns_of_one_scheduler(tmp_path: Path) -> None:
    target, drafter = generate_tiny(tmp_path / "pair", noise=0.05)
    flags = ("--max-num-seqs", "8", "--tensor-parallel-size", "2", *drafting_with(drafter))
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
    ("given", "words"),
    [
        (NGRAM, "--speculative-config: method: 'ngram' is invalid; only draft_model, eagle"),
        ({**NGRAM, "method": "draft_model"}, "--max-num-seqs: 4 is invalid; "),
    ],
    ids=["method", "requests"],
)
def test_a_server_that_cannot_change_its_count_does_not_start(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    target, drafter = generate_tiny(tmp_path / "pair")
    if given["method"] == "draft_model":
        given = {**given, "model": str(drafter)}
    log = tmp_path / "log.txt"
    with (
        pytest.raises(AssertionError, match="the process has ended"),
        server(target, log, *speculating(given), VLLM_NWOR_DRAFTS="interleave"),
    ):
        pass
    assert words in log.read_text()
