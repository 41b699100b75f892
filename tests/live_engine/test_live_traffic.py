"""`vllm serve` that stages, always or interleaved with off: stock answers, ratio and guards.

In `make test` half of the windows are staged and half of a load's requests are cancelled; the stock
answers are then those of an engine in this process, with the hooks taken off.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from urllib.request import urlopen

import pytest
from engine_tools import tiny_spec
from prometheus_client.parser import text_string_to_metric_families
from server_tools import (
    DRAFTS,
    PROMPTS,
    Servers,
    ask_worker,
    complete,
    environment,
    load,
    metrics_when,
    nwor_live,
    read_metrics,
    server,
    speculating,
    started,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.models.pairs.tiny import generate_tiny
from nwor_bench.records.fallback_reasons import in_words

pytestmark = pytest.mark.engine

ON_GPU = pytest.mark.gpu
LONG = pytest.mark.long
REQUESTS = 200
RATIOS = ("nwor_live_ratio_low", "nwor_live_ratio", "nwor_live_ratio_high")
LOADS = 20
ENOUGH = 10
"""Groups that an interval takes."""

FINDS_WORKER = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{Path(__file__).parent}"}
"""The planted worker's module."""

SURROUNDINGS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "cpu": ((), {}),
    # The share that vLLM looks for: each server takes next to nothing of it. float32 is no tf32,
    # like in a sweep, and no sampler has to be built while requests wait.
    "gpu": (
        ("--gpu-memory-utilization", "0.3"),
        {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
    ),
}
"""Flags and environment variables of servers by device."""


def on(*devices: str, cpu: tuple[pytest.MarkDecorator, ...] = ()) -> pytest.MarkDecorator:
    """Run a test on these devices, on a CPU with further marks."""
    cases = [pytest.param(d, marks=cpu if d == "cpu" else ON_GPU, id=d) for d in devices]
    return pytest.mark.parametrize("device", cases, indirect=True)


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """Where servers run; on a GPU they have to find the plugin."""
    name: str = request.param
    if name == "gpu" and not entry_points(group="vllm.general_plugins", name="nwor_bench"):
        pytest.skip("the plugin is not installed here: pip install --no-deps -e .")
    return name


@contextmanager
def serving(
    device: str, folder: Path, mode: str, *, stock: bool = True
) -> Iterator[tuple[Servers, ResolvedPair]]:
    """One server as vLLM ships it, without the plugin, and one in this mode; they serve this pair.

    A server that interleaves has a worker that can go wrong.
    """
    target, drafter = generate_tiny(folder / "pair", noise=0.05)
    flags, extra = SURROUNDINGS[device]
    worker = "nwor_bench.plugin.worker.NworWorkerExtension"
    if mode == "interleave":
        flags, extra = (*flags, *speculating("draft_model", drafter)), FINDS_WORKER | extra
        worker = "planted_live.PlantedWorker"
    modes = {"VLLM_NWOR_MODE": mode, "VLLM_SCV_MODE": "graph", "VLLM_SERVER_DEV_MODE": "1"}
    if mode == "stage":
        modes["VLLM_NWOR_BESIDE_PREFILL"] = "stage"  # a load is to stage all that it can
    starting = [server(target, folder / "staged.txt", *flags, "--worker-extension-cls", worker,
                       **modes, **extra)]  # fmt: skip
    if stock:
        starting.append(server(target, folder / "stock.txt", *flags, **extra))
    with started(*starting) as (staged, *others):
        pair = ResolvedPair("tiny", "draft_model", str(target), str(drafter), "float32")
        yield Servers("".join(others), staged), pair


@pytest.fixture(scope="module")
def served(
    device: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Servers, ResolvedPair]]:
    """Servers whose modes are interleaved; on a GPU one as vLLM ships it beside it."""
    folder = tmp_path_factory.mktemp("live")
    with serving(device, folder, "interleave", stock=device == "gpu") as found:
        yield found


@pytest.fixture(scope="module")
def servers(served: tuple[Servers, ResolvedPair]) -> Servers:
    return served[0]


@pytest.fixture(scope="module")
def stock(
    served: tuple[Servers, ResolvedPair], start_engine: Callable[..., VllmEngine]
) -> dict[str, str]:
    """The stock answers, by prompt."""
    servers, pair = served
    if servers.stock:
        return answers_of(servers.stock)
    from vllm import SamplingParams

    engine = start_engine(pair, tiny_spec(block_size=32))
    engine.set_hooks(False)
    outputs = engine._llm.generate(
        PROMPTS, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False
    )
    engine.close()
    return {output.prompt: output.outputs[0].text for output in outputs}


def answers_of(base: str) -> dict[str, str]:
    return {prompt: complete(base, prompt) for prompt in PROMPTS}


@on("cpu", "gpu", cpu=(LONG,))
@pytest.mark.row("vllm serve")
@pytest.mark.row("cancelled requests")
def test_staging_serves_the_stock_answers_also_after_cancelled_requests(
    device: str, tmp_path: Path
) -> None:
    with serving(device, tmp_path, "stage") as (own, _):
        stock = answers_of(own.stock)
        assert "nwor_windows_total" not in read_metrics(f"{own.stock}/metrics")
        before = read_metrics(f"{own.staged}/metrics")["nwor_total_staged_total"]
        assert answers_of(own.staged) == stock
        assert read_metrics(f"{own.staged}/metrics")["nwor_total_staged_total"] > before
        check_load(own.staged, stock)


def check_load(base: str, stock: dict[str, str]) -> None:
    """A load of which every second request may be cancelled leaves nothing behind.

    Greedy and sampled requests apart: where they share a batch, stock vLLM 0.32 samples the
    greedy ones too on a CPU as soon as it speculates.
    """
    finished = asyncio.run(load(base, REQUESTS))
    assert len(finished) >= REQUESTS // 2
    assert finished == [(prompt, stock[prompt]) for prompt, _ in finished]
    asyncio.run(load(base, REQUESTS // 4, temperature=0.9))
    wait_until_idle(base)
    assert ask_worker(base, "nwor_window_state") == "idle"
    assert answers_of(base) == stock
    samples = read_metrics(f"{base}/metrics")
    assert samples["nwor_total_staged_total"] == samples["nwor_draft_tokens_total"] > 0
    settled = samples["nwor_total_committed_total"] + samples["nwor_total_rejected_total"]
    assert samples["nwor_total_staged_total"] == settled
    assert samples["nwor_total_committed_total"] == samples["nwor_accepted_tokens_total"]
    assert samples.get("nwor_fallback_count_total", 0) == 0


def wait_until_idle(base: str) -> None:
    """vLLM takes cancelled requests out of its queues a little later."""
    deadline = time.monotonic() + 60
    queues = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    while any(read_metrics(f"{base}/metrics")[name] for name in queues):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@on("cpu", "gpu")
@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    device: str, servers: Servers, stock: dict[str, str]
) -> None:
    check_interleaved(servers.staged, stock)
    if device == "cpu":
        assert fallbacks(servers.staged).keys() == {"beside_prefill"}


def check_interleaved(base: str, stock: dict[str, str]) -> None:
    """The stock answers, both modes, counts that add up, and a ratio with its interval."""
    began = read_metrics(f"{base}/metrics")
    assert began["nwor_live_groups_total"] == 0
    assert "nwor_live_ratio" not in began
    assert answers_of(base) == stock
    metrics_when(base, counts_agree)
    for _ in range(LOADS):  # half of these are cancelled on the way
        finished = asyncio.run(load(base, 40))
        assert len(finished) >= 20  # all that nobody cut off: none failed
        assert finished == [(prompt, stock[prompt]) for prompt, _ in finished]
        # One at a time few prefills come between: most groups that count are of these.
        assert answers_of(base) == stock
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


@on("cpu", "gpu")
def test_the_command_shows_it(device: str, servers: Servers) -> None:
    """`nwor-bench live` says what the metrics say, and what a stock server lacks."""
    code, out = nwor_live(servers.staged, "--json", "--time-budget", "2s")
    told = json.loads(out)
    assert code == 0
    assert told["classes"][-1]["num_reqs"] == "all"
    assert told["classes"][-1]["ratio"] > 0
    assert told["clock"] == ("host" if device == "cpu" else "device")
    if servers.stock:
        code, out = nwor_live(servers.stock)
        assert code == 2
        assert "VLLM_NWOR_MODE=interleave" in out


@on("cpu", "gpu", cpu=(LONG,))
def test_a_refused_commit_stops_staging_and_the_server_goes_on(
    device: str, servers: Servers, stock: dict[str, str]
) -> None:
    """Only its flag is planted, so every answer stays right. Last: the server stages no more."""
    fault = {"cpu": "refused_commit", "gpu": "device_refusal"}[device]
    check_stops(servers.staged, stock, fault, "commit_refused")
    if device == "cpu":
        found = fallbacks(servers.staged)
        found.pop("beside_prefill", None)  # of a load before it, if there was one
        assert list(found.values()) == [1]


@on("cpu", "gpu", cpu=(LONG,))
def test_a_commit_that_writes_nothing_stops_staging(device: str, tmp_path: Path) -> None:
    with serving(device, tmp_path, "interleave", stock=False) as (own, _):
        complete(own.staged, PROMPTS[0])
        check_stops(own.staged, None, "no_commit", "counts_do_not_add_up")


def check_stops(base: str, stock: dict[str, str] | None, fault: str, reason: str) -> None:
    """Plant a fault: staging stops for good, and every answer stays right.

    `stock` is None for a fault that loses committed tokens: answers are then not compared.
    """
    ask_worker(base, "plant", fault)

    def answers() -> dict[str, str] | None:
        found = answers_of(base)
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
    told = " ".join(out.split())
    assert in_words(reason) in told
    assert "goes on" in told


@pytest.mark.long
def test_two_ranks_take_the_same_turns_and_stop_together(tmp_path: Path) -> None:
    """A fault that only rank 1 can see; ranks that disagreed would wait for each other."""
    modes = {"VLLM_NWOR_MODE": "interleave", "VLLM_SERVER_DEV_MODE": "1", **FINDS_WORKER}
    flags = ("--tensor-parallel-size", "2", "--worker-extension-cls", "planted_live.PlantedWorker")
    target = generate_tiny(tmp_path / "pair", noise=0.05)[0]
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    with server(target, tmp_path / "log.txt", *flags, **modes, **bind) as base:
        metrics = f"{base}/metrics"
        answers = answers_of(base)
        names = ("nwor_total_staged_total", "nwor_windows_total")
        before = [read_metrics(metrics, rank=rank) for rank in "01"]
        assert all(0 < before[0][name] == before[1][name] for name in names)
        ask_worker(base, "plant", "miscount", 1)
        assert answers_of(base) == answers

        def both_stopped(_: dict[str, float]) -> bool:
            found = [read_metrics(metrics, rank=rank) for rank in "01"]
            return [each["nwor_live_staging_stopped_total"] for each in found] == [1, 1]

        metrics_when(base, both_stopped)
        stopped = [read_metrics(metrics, rank=rank) for rank in "01"]
        assert answers_of(base) == answers
        after = [read_metrics(metrics, rank=rank) for rank in "01"]
    for rank in (0, 1):
        assert after[rank][names[0]] == stopped[rank][names[0]] == stopped[0][names[0]]
        assert after[rank][names[1]] > stopped[rank][names[1]]
    assert "rank_1:counts_do_not_add_up" in (tmp_path / "log.txt").read_text()
