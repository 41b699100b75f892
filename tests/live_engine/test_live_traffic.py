"""`vllm serve` that stages, always or interleaved with off: stock answers, ratio and guards.

The servers are vLLM's own processes. One that always stages is in test-all: here half of the
windows are staged, and half of a load's requests are cancelled too.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_tools import (
    HERE,
    check_command,
    check_interleaved,
    check_stops,
    fallbacks,
    metrics_when,
    stock_and_interleaved,
    stock_answers,
)
from serve_tools import (
    PROMPTS,
    Servers,
    ask_worker,
    check_answers,
    check_load,
    stock_and_staged,
)
from server_tools import CHECKOUT, complete, read_metrics, server

from nwor_bench.models.pairs.tiny import generate_tiny

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def staging_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, without the plugin, one that stages."""
    with stock_and_staged(tmp_path_factory.mktemp("serve")) as started:
        yield started


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one in which the modes are interleaved."""
    with stock_and_interleaved(tmp_path_factory.mktemp("live")) as started:
        yield started


@pytest.fixture(scope="module")
def stock(servers: Servers) -> dict[str, str]:
    return stock_answers(servers)


@pytest.mark.long
@pytest.mark.row("vllm serve")
def test_staging_serves_the_stock_answers(staging_servers: Servers) -> None:
    check_answers(staging_servers)


@pytest.mark.long
@pytest.mark.row("cancelled requests")
def test_a_load_with_cancelled_requests_leaves_nothing_behind(staging_servers: Servers) -> None:
    check_load(staging_servers)


@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    servers: Servers, stock: dict[str, str]
) -> None:
    check_interleaved(servers, stock)
    assert fallbacks(servers.staged).keys() == {"beside_prefill"}


def test_the_command_shows_it(servers: Servers) -> None:
    check_command(servers, "host")


@pytest.mark.long
def test_a_refused_commit_stops_staging_and_the_server_goes_on(
    servers: Servers, stock: dict[str, str]
) -> None:
    """Last of this module's server: it stages no more."""
    check_stops(servers.staged, stock, "refused_commit", "commit_refused")
    found = fallbacks(servers.staged)
    found.pop("beside_prefill", None)  # of a load before it, if there was one
    assert list(found.values()) == [1]


@pytest.mark.long
def test_a_commit_that_writes_nothing_stops_staging(tmp_path: Path) -> None:
    with stock_and_interleaved(tmp_path) as own:
        complete(own.staged, PROMPTS[0])
        check_stops(own.staged, None, "no_commit", "counts_do_not_add_up")


@pytest.mark.long
def test_two_ranks_take_the_same_turns_and_stop_together(tmp_path: Path) -> None:
    """A fault that only rank 1 can see; ranks that disagreed would wait for each other."""
    path = ":".join((str(CHECKOUT), f"{CHECKOUT}/kernels", HERE))
    modes = {"VLLM_NWOR_MODE": "interleave", "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    flags = ("--tensor-parallel-size", "2", "--worker-extension-cls", "planted_live.PlantedWorker")
    target = generate_tiny(tmp_path / "pair", noise=0.05)[0]
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    with server(target, tmp_path / "log.txt", *flags, **modes, **bind) as base:
        metrics = f"{base}/metrics"
        answers = {prompt: complete(base, prompt) for prompt in PROMPTS}
        names = ("nwor_total_staged_total", "nwor_windows_total")
        before = [read_metrics(metrics, rank=rank) for rank in "01"]
        assert all(0 < before[0][name] == before[1][name] for name in names)
        ask_worker(base, "plant", "miscount", 1)
        assert {prompt: complete(base, prompt) for prompt in PROMPTS} == answers

        def both_stopped(_: dict[str, float]) -> bool:
            found = [read_metrics(metrics, rank=rank) for rank in "01"]
            return [each["nwor_live_staging_stopped_total"] for each in found] == [1, 1]

        metrics_when(base, both_stopped)
        stopped = [read_metrics(metrics, rank=rank) for rank in "01"]
        assert {prompt: complete(base, prompt) for prompt in PROMPTS} == answers
        after = [read_metrics(metrics, rank=rank) for rank in "01"]
    for rank in (0, 1):
        assert after[rank][names[0]] == stopped[rank][names[0]] == stopped[0][names[0]]
        assert after[rank][names[1]] > stopped[rank][names[1]]
    assert "rank_1:counts_do_not_add_up" in (tmp_path / "log.txt").read_text()
