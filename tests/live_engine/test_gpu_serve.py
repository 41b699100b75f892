"""`vllm serve` on a GPU: the stock answers, vLLM's counts, and a load with cancelled requests."""

import time
from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from serve_tools import PROMPTS, Servers, check_answers, check_load, stock_and_staged
from server_tools import complete, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

SHARED_GPU = ("--gpu-memory-utilization", "0.3")
"""Of which each server takes next to nothing, but it looks whether there is that much."""

EXACT = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""As in a sweep float32 is no tf32; and no sampler has to be built while requests wait."""

COUNTERS = {
    "nwor_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "nwor_total_staged_total": "vllm:spec_decode_num_draft_tokens_total",
    "nwor_accepted_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "nwor_total_committed_total": "vllm:spec_decode_num_accepted_tokens_total",
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one that stages."""
    if not entry_points(group="vllm.general_plugins", name="nwor_bench"):
        pytest.skip("the plugin is not installed here: pip install --no-deps -e .")
    folder = tmp_path_factory.mktemp("serve")
    with stock_and_staged(folder, *SHARED_GPU, **EXACT) as started:
        yield started


@pytest.mark.row("vllm serve")
def test_staging_serves_the_stock_answers(servers: Servers) -> None:
    check_answers(servers)


@pytest.mark.row("vllm serve")
def test_our_counters_beside_vllms_own(servers: Servers) -> None:
    """Counts stay on the device until the server has nothing to do: they come a little later."""
    complete(servers.staged, PROMPTS[-1])
    deadline = time.monotonic() + 30
    while True:
        samples = read_metrics(f"{servers.staged}/metrics")
        wrong = {
            ours: (samples[ours], samples[vllms])
            for ours, vllms in COUNTERS.items()
            if samples[ours] != samples[vllms]
        }
        if not wrong:
            break
        assert time.monotonic() < deadline, wrong
        time.sleep(0.2)
    assert samples["nwor_draft_tokens_total"] > samples["nwor_accepted_tokens_total"] > 0


@pytest.mark.row("cancelled requests")
def test_a_load_with_cancelled_requests_leaves_nothing_behind(servers: Servers) -> None:
    check_load(servers)
