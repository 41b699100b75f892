"""`vllm serve` on a GPU: the stock answers, vLLM's counts, and a load with cancelled requests."""

from collections.abc import Iterator
from importlib.metadata import entry_points

import pytest
from serve_tools import Servers, check_answers, check_load, stock_and_staged

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

SHARED_GPU = ("--gpu-memory-utilization", "0.3")
"""Of which each server takes next to nothing, but it looks whether there is that much."""

EXACT = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""As in a sweep float32 is no tf32; and no sampler has to be built while requests wait."""


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


@pytest.mark.row("cancelled requests")
def test_a_load_with_cancelled_requests_leaves_nothing_behind(servers: Servers) -> None:
    check_load(servers)
