"""`vllm serve` with staging: the stock answers, also after a load with cancelled requests.

The two servers are vLLM's own processes; the stock one runs without the plugin.
"""

from collections.abc import Iterator

import pytest
from serve_tools import Servers, check_answers, check_load, stock_and_staged

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one that stages."""
    with stock_and_staged(tmp_path_factory.mktemp("serve")) as started:
        yield started


@pytest.mark.row("vllm serve")
def test_staging_serves_the_stock_answers(servers: Servers) -> None:
    check_answers(servers)


@pytest.mark.row("cancelled requests")
def test_a_load_with_cancelled_requests_leaves_nothing_behind(servers: Servers) -> None:
    check_load(servers)
