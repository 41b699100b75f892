"""Which CUDA graphs are safe with several draft counts, by vLLM's own choice of them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.draft_counts import (
    SAFE_GRAPHS,
    UNSAFE_GRAPHS,
    schedule_of,
    window_sizes,
)
from nwor_bench.plugin.draft_patches import _choose_graphs

pytestmark = pytest.mark.slow  # imports vLLM

SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""vLLM's default cudagraph_capture_sizes."""
REQUESTS = 128


def manager(mode: str, counts: range, sizes: list[int]) -> Any:
    """vLLM's chooser of graphs, with its candidates and no graph."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: len(counts) > 1,
        num_speculative_tokens_per_batch_size=schedule_of(counts),
    )
    own = CudaGraphManager.__new__(CudaGraphManager)
    own.vllm_config = SimpleNamespace(
        speculative_config=speculative, num_speculative_tokens=counts[-1],
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )  # fmt: skip
    own.compilation_config = SimpleNamespace(
        cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
    )
    own.max_num_reqs, own.decode_query_len = REQUESTS, counts[-1] + 1
    own.cudagraph_mode, own.varlen_decode, own.ubatch_runner = CUDAGraphMode[mode], False, None
    own.lora_capture_cases, own._lora_dispatch_map = [0], {}
    own._candidates, own._capture_descs, own._graphs_captured = {}, {}, True
    own._init_candidates()
    return own


def other_batches(mode: str, counts: range, sizes: list[int] = SIZES) -> list[tuple[int, int]]:
    """Requests and draft counts for which the drafter replays the graph of a larger batch than the
    target's metadata are of: it is asked with the tokens to which the target was padded."""
    from vllm.config.compilation import CUDAGraphMode

    chooser = manager(mode, counts, sizes)
    found = []
    for k in counts:
        for requests in range(1, REQUESTS + 1):
            target = chooser.dispatch(requests, requests * (k + 1), k + 1, 0)
            drafter = chooser.dispatch(requests, target.num_tokens, k + 1, 0)
            full = drafter.cg_mode is CUDAGraphMode.FULL
            if full and (target.cg_mode is not CUDAGraphMode.FULL or target != drafter):
                found.append((requests, k))
    return found


def test_one_count_and_full_graphs_alone_are_safe() -> None:
    assert other_batches(UNSAFE_GRAPHS, range(4, 5)) == []
    assert other_batches(SAFE_GRAPHS, range(5)) == []


def test_worths_own_sizes_are_safe_and_give_every_window_its_graph() -> None:
    from vllm.config.compilation import CUDAGraphMode

    measured, counts = [1, 8, 32, 128], range(5)
    sizes = window_sizes(measured, counts[-1])
    assert other_batches(SAFE_GRAPHS, counts, sizes) == []
    chooser = manager(SAFE_GRAPHS, counts, sizes)
    for requests in measured:
        for k in counts:
            chosen = chooser.dispatch(requests, requests * (k + 1), k + 1, 0)
            assert chosen.cg_mode is CUDAGraphMode.FULL
            assert (chosen.num_reqs, chosen.num_tokens) == (requests, requests * (k + 1))
        # The drafter's steps behind its first: a token a request.
        assert requests in sizes


def test_vllms_default_graphs_are_not_with_several_counts() -> None:
    """If this fails, vLLM was mended: then its default may stay."""
    found = other_batches(UNSAFE_GRAPHS, range(5))
    assert (9, 0) in found
    assert len(found) > 20


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        (None, SAFE_GRAPHS),
        ("PIECEWISE", "PIECEWISE"),
        ("NONE", "NONE"),
        (UNSAFE_GRAPHS, None),
    ],
)
def test_a_server_takes_full_graphs_unless_told_otherwise_and_no_unsafe_ones(
    given: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    config = SimpleNamespace(cudagraph_mode=given and CUDAGraphMode[given])
    refused = f"cudagraph_mode: '{UNSAFE_GRAPHS}' is invalid"
    with nullcontext() if chosen else pytest.raises(ConfigError, match=refused):
        _choose_graphs(config)
    assert config.cudagraph_mode.name == (chosen or given)
