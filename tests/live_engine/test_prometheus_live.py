"""/metrics while a sweep runs and while vLLM serves: real processes, real HTTP, counters rising."""

import json
import sys
import time
from pathlib import Path

import pytest
from server_tools import START_S, complete, process, read_metrics, server, wait_for

from nwor_bench.models.pairs.tiny import generate_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]


def test_a_sweep_serves_its_counters_while_it_runs(tmp_path: Path, pair_cache: Path) -> None:
    flags = ("--requests", "2", "--batches", "3", "--max-new-tokens", "24", "--seed", "5")
    sweep = ["sweep", "--pair", "tiny", *flags, "--output", str(tmp_path / "run")]
    main = "from nwor_bench.cli.app import main; main()"
    command = [sys.executable, "-c", main, *sweep, "--prometheus-port", "0"]
    log = tmp_path / "out.txt"
    marker = "metrics: http://localhost:"
    with process(command, log, NWOR_BENCH_CACHE=str(pair_cache)) as child:
        wait_for(child, log, "the port", lambda: marker in log.read_text())
        address = next(line for line in log.read_text().splitlines() if marker in line)
        address = address.removeprefix("metrics: ")
        seen: list[float] = []

        def has_risen_twice() -> bool:
            windows = read_metrics(address).get("nwor_windows_total", 0.0)
            if not seen or windows > seen[-1]:
                seen.append(windows)
            return len(seen) > 2

        wait_for(child, log, "rising counters", has_risen_twice)
        last = read_metrics(address)
        assert child.wait(START_S) == 0
    assert seen[1] > seen[0]
    assert last["nwor_draft_tokens_total"] >= last["nwor_accepted_tokens_total"] > 0
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "complete"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_tiny(tmp_path_factory.mktemp("pair"), noise=0.05)[0]


def metrics_of_all_ranks(address: str, ranks: int) -> dict[str, float]:
    """Samples once all ranks have counted what vLLM counted, or those of 20 s later.

    vLLM answers a request as soon as the first rank is done, so the others may still be counting.
    """
    deadline = time.monotonic() + 20
    while True:
        samples = read_metrics(address)
        drafts = ranks * samples["vllm:spec_decode_num_draft_tokens_total"]
        if samples["nwor_draft_tokens_total"] == drafts or time.monotonic() > deadline:
            return samples
        time.sleep(0.2)


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "two ranks, vLLM's own folder"])
def test_vllm_serves_our_counters_beside_its_own(target: Path, tmp_path: Path, ranks: int) -> None:
    """Two tensor-parallel ranks each count what vLLM counts once.

    They write to the folder that vLLM makes for several API servers.
    """
    extra = {"VLLM_NWOR_MODE": "stage", "VLLM_SCV_MODE": "off"}
    if ranks > 1:
        extra |= {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "0|0"}
    flags = ("--tensor-parallel-size", str(ranks))
    with server(target, tmp_path / "log.txt", *flags, **extra) as base:
        address = f"{base}/metrics"
        assert read_metrics(address)["nwor_windows_total"] == 0
        complete(base, "one two one two one two one two")
        first = metrics_of_all_ranks(address, ranks)
        complete(base, "three four three four three four")
        second = metrics_of_all_ranks(address, ranks)
        by_rank = [read_metrics(address, rank=str(rank)) for rank in range(ranks)]
    for name in ("nwor_windows_total", "nwor_total_staged_total", "nwor_stage_operations_total"):
        assert 0 < first[name] < second[name]
    for samples in (first, second):
        drafts = samples["vllm:spec_decode_num_draft_tokens_total"]
        accepted = samples["vllm:spec_decode_num_accepted_tokens_total"]
        assert samples["nwor_draft_tokens_total"] == ranks * drafts
        assert samples["nwor_total_staged_total"] == ranks * drafts
        assert samples["nwor_accepted_tokens_total"] == ranks * accepted
        assert samples["nwor_total_committed_total"] == ranks * accepted
    for samples in by_rank:
        assert samples["nwor_total_staged_total"] == drafts
        assert samples["nwor_total_committed_total"] == accepted
        assert samples["nwor_acceptance_rate"] == pytest.approx(accepted / drafts)
