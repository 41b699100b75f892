"""`vllm serve` on a GPU that stages, always or interleaved with off: answers, ratio, refusals."""

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from drafts_tools import check_draft_turns, check_drafts_command, k_0_and_interleaved
from live_tools import (
    check_command,
    check_interleaved,
    check_stops,
    stock_and_interleaved,
    stock_answers,
)
from serve_tools import PROMPTS, Servers, check_answers, check_load, stock_and_staged
from server_tools import complete

from nwor_bench.models.pairs import resolve_pair

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

SHARED_GPU = ("--gpu-memory-utilization", "0.3")
"""Share that vLLM looks for; each server takes next to nothing of it."""

EXACT = {"TRITON_F32_DEFAULT": "ieee", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""float32 is no tf32, like in a sweep; and no sampler has to be built while requests wait."""


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
@pytest.mark.row("cancelled requests")
def test_staging_serves_the_stock_answers_also_after_cancelled_requests(
    installed: None, tmp_path: Path
) -> None:
    with stock_and_staged(tmp_path, *SHARED_GPU, **EXACT) as own:
        check_answers(own)
        check_load(own)


@pytest.mark.row("vllm serve")
def test_turns_serve_the_stock_answers_and_show_their_ratio(
    servers: Servers, stock: dict[str, str]
) -> None:
    check_interleaved(servers, stock)


def test_draft_counts_alternate_with_the_answers_of_k_0(installed: None, tmp_path: Path) -> None:
    """Drafts come from an MTP layer: on the V2 runner a draft model has one count."""
    target = Path(resolve_pair("tiny-mtp").target)
    speculation = {"method": "mtp"}
    with k_0_and_interleaved(tmp_path, target, speculation, *SHARED_GPU, **EXACT) as own:
        check_draft_turns(own)
        check_drafts_command(own.staged, "device")


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
