"""`vllm serve` in which off and stage take turns: the stock answers, the ratio, the guards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_tools import check_command, check_stops, check_turns, stock_and_turns, stock_answers
from serve_tools import Servers
from server_tools import read_metrics

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one in which the modes take turns."""
    with stock_and_turns(tmp_path_factory.mktemp("live")) as started:
        yield started


@pytest.fixture(scope="module")
def stock(servers: Servers) -> dict[str, str]:
    return stock_answers(servers)


@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    servers: Servers, stock: dict[str, str]
) -> None:
    check_turns(servers, stock)
    assert read_metrics(f"{servers.staged}/metrics")["nwor_fallback_count_total"] == 0


def test_the_command_shows_it(servers: Servers) -> None:
    check_command(servers, "host")


def test_a_refused_commit_stops_staging_and_the_server_goes_on(
    servers: Servers, stock: dict[str, str]
) -> None:
    """Last of this module's server: it stages no more."""
    check_stops(servers.staged, stock, "refused_commit", "commit_refused")
    assert read_metrics(f"{servers.staged}/metrics")["nwor_fallback_count_total"] == 1


@pytest.mark.long
def test_counts_that_do_not_add_up_stop_staging(tmp_path: Path) -> None:
    with stock_and_turns(tmp_path) as own:
        check_stops(own.staged, stock_answers(own), "miscount", "counts_do_not_add_up")
