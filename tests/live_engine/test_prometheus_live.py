"""/metrics while vLLM serves: real processes, real HTTP, counters rising."""

import time
from pathlib import Path

import pytest
from server_tools import complete, read_metrics, server

from nwor_bench.models.pairs.tiny import generate_tiny

pytestmark = [pytest.mark.engine, pytest.mark.long]


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
