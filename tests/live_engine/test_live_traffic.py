"""`vllm serve` in which off and stage take turns: the stock answers, the ratio, the guards."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serve_tools import PROMPTS, Servers, ask_worker, load, stock_and_staged
from server_tools import CHECKOUT, complete, environment, read_metrics

pytestmark = [pytest.mark.engine]

HERE = str(Path(__file__).parent)
RATIOS = ("nwor_live_ratio_low", "nwor_live_ratio", "nwor_live_ratio_high")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one in which the modes take turns."""
    path = ":".join((str(CHECKOUT), f"{CHECKOUT}/kernels", HERE))
    with stock_and_staged(
        tmp_path_factory.mktemp("live"),
        nwor_mode="interleave",
        extension="planted_live.PlantedWorker",
        draft_model=True,  # each step behind a prefill is a window
        PYTHONPATH=path,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def stock(servers: Servers) -> dict[str, str]:
    return {prompt: complete(servers.stock, prompt) for prompt in PROMPTS}


def metrics_when(base: str, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Samples of the class `all` and those without a class, once they are as wanted."""
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


@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    servers: Servers, stock: dict[str, str]
) -> None:
    base = servers.staged
    began = read_metrics(f"{base}/metrics")
    assert began["nwor_live_groups_total"] == 0
    assert "nwor_live_ratio" not in began
    assert {prompt: complete(base, prompt) for prompt in PROMPTS} == stock
    for _ in range(20):
        finished = asyncio.run(load(base, 40))
        assert len(finished) >= 20  # those that nobody cut off: none failed
        assert finished == [(prompt, stock[prompt]) for prompt, _ in finished]
        if read_metrics(f"{base}/metrics", num_reqs="all")["nwor_live_groups_total"] >= 30:
            break
    found = metrics_when(base, lambda found: "nwor_live_ratio" in found)
    low, ratio, high = (found[name] for name in RATIOS)
    assert 0 < low < ratio < high
    assert found["nwor_live_groups_total"] >= 10
    # Both modes ran: some windows were staged, some not, and what was staged is settled.
    staged = found["nwor_total_staged_total"]
    assert 0.2 < staged / found["nwor_draft_tokens_total"] < 0.8
    settled = found["nwor_total_committed_total"] + found["nwor_total_rejected_total"]
    assert staged == settled
    assert found["nwor_fallback_count_total"] == 0
    assert found["nwor_live_staging_stopped_total"] == 0
    assert found["nwor_draft_tokens_total"] == found["vllm:spec_decode_num_draft_tokens_total"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    assert found["nwor_accepted_tokens_total"] == accepted


def test_the_command_shows_it(servers: Servers) -> None:
    code, out = nwor_live(servers.staged, "--ci-width", "90%", "--json", "--time-budget", "30s")
    told = json.loads(out)
    assert code == 0
    assert told["classes"][-1]["num_reqs"] == "all"
    assert told["classes"][-1]["ratio"] > 0
    assert told["clock"] == "host"
    code, out = nwor_live(servers.stock)
    assert code == 2
    assert "VLLM_NWOR_MODE=interleave" in out


def stops_for(servers: Servers, stock: dict[str, str], fault: str, reason: str) -> None:
    """Plant a fault: staging stops for good, and every answer stays right."""
    base = servers.staged
    ask_worker(base, "plant", fault)
    assert {prompt: complete(base, prompt) for prompt in PROMPTS} == stock

    def stopped(_: dict[str, float]) -> bool:
        found = read_metrics(f"{base}/metrics", reason=reason)
        return found.get("nwor_live_staging_stopped_total") == 1

    before = metrics_when(base, stopped)
    assert {prompt: complete(base, prompt) for prompt in PROMPTS} == stock
    assert len(asyncio.run(load(base, 20))) >= 10
    after = read_metrics(f"{base}/metrics")
    assert after["nwor_total_staged_total"] == before["nwor_total_staged_total"]
    assert after["nwor_windows_total"] > before["nwor_windows_total"]
    assert after["nwor_fallback_count_total"] == 1
    assert after["nwor_live_staging_stopped_total"] == 1
    code, out = nwor_live(base, "-q")
    assert code == 3
    assert reason in out
    assert "goes on" in out


def test_a_refused_commit_stops_staging_and_the_server_goes_on(
    servers: Servers, stock: dict[str, str]
) -> None:
    """Last of this module's server: it stages no more."""
    stops_for(servers, stock, "refused_commit", "commit_refused")


@pytest.mark.long
def test_counts_that_do_not_add_up_stop_staging(
    tmp_path: Path, servers: Servers, stock: dict[str, str]
) -> None:
    path = ":".join((str(CHECKOUT), f"{CHECKOUT}/kernels", HERE))
    extension = "planted_live.PlantedWorker"
    with stock_and_staged(
        tmp_path, nwor_mode="interleave", extension=extension, draft_model=True, PYTHONPATH=path
    ) as own:
        stops_for(own, stock, "miscount", "counts_do_not_add_up")
