"""`vllm serve` on a GPU in which off and stage are interleaved: answers, ratio, refusals."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from live_tools import (
    check_command,
    check_interleaved,
    check_stops,
    stock_and_interleaved,
    stock_answers,
)
from serve_tools import PROMPTS, Servers
from server_tools import complete
from test_gpu_serve import EXACT, SHARED_GPU

pytestmark = [pytest.mark.engine, pytest.mark.gpu]


@pytest.fixture(scope="module")
def installed() -> None:
    """The plugin, for servers to find."""
    if not entry_points(group="vllm.general_plugins", name="nwor_bench"):
        pytest.skip("the plugin is not installed here: pip install --no-deps -e .")


@pytest.fixture(scope="module")
def servers(installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One server as vLLM ships it, one in which the modes are interleaved."""
    with stock_and_interleaved(tmp_path_factory.mktemp("live"), *SHARED_GPU, **EXACT) as started:
        yield started


@pytest.fixture(scope="module")
def stock(servers: Servers) -> dict[str, str]:
    return stock_answers(servers)


@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    servers: Servers, stock: dict[str, str]
) -> None:
    check_interleaved(servers, stock)


def test_the_command_shows_the_devices_clock(servers: Servers) -> None:
    check_command(servers, "device")


def test_a_commit_that_the_device_refused_stops_staging(
    servers: Servers, stock: dict[str, str]
) -> None:
    """Only its flag is planted, so every answer stays right. Last: the server stages no more."""
    check_stops(servers.staged, stock, "device_refusal", "commit_refused")


def test_a_commit_that_writes_nothing_stops_staging(installed: None, tmp_path: Path) -> None:
    with stock_and_interleaved(tmp_path, *SHARED_GPU, **EXACT) as own:
        complete(own.staged, PROMPTS[0])
        check_stops(own.staged, None, "no_commit", "counts_do_not_add_up")
