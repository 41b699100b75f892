"""Distances of recurrent states from stock's, which is a stand-in here, and sums of blocks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_bench.plugin.observe import layer_checks, state_checks
from nwor_bench.plugin.state_layers import StateCall, StateLayer, StateTrace

REQUESTS, WINDOW, HEADS, WIDTH = 2, 5, 3, 16
TOKENS = REQUESTS * WINDOW
COUNTS = [3, 5]
"""Tokens that each request got: the next windows read the states behind these."""


@pytest.fixture
def layer() -> StateLayer:
    state = torch.zeros(1 + TOKENS, HEADS, WIDTH, WIDTH)
    return StateLayer("net", SimpleNamespace(), 0, state)


@pytest.fixture
def call(layer: StateLayer, monkeypatch: pytest.MonkeyPatch) -> StateCall:
    """Stock's states are random, the second head's a thousandth of the others'; ours equal them."""
    random = torch.Generator().manual_seed(7)
    theirs = torch.randn(1 + TOKENS, HEADS, WIDTH, WIDTH, generator=random)
    theirs[:, 1] *= 1e-3
    output = torch.randn(TOKENS, HEADS, WIDTH, generator=random)

    def stock(layer: Any, call: Any, state: torch.Tensor, *_: Any) -> torch.Tensor:
        state.copy_(theirs)
        return output

    monkeypatch.setattr(state_checks, "_stock_recurrence", stock)
    layer.state.copy_(theirs)
    nothing = torch.zeros(TOKENS, 1)
    return StateCall(
        mixed=nothing, a=nothing, b=nothing, gate=None,
        indices=torch.arange(1, 1 + TOKENS, dtype=torch.int32).view(REQUESTS, WINDOW),
        accepted=torch.ones(REQUESTS, dtype=torch.int32),
        bounds=torch.tensor([0, WINDOW, TOKENS], dtype=torch.int32),
        convolution=nothing, first=theirs[[1, 1 + WINDOW]] * 0.5,
        convolved=nothing, output=output.clone(),
    )  # fmt: skip


def told(layer: StateLayer, call: StateCall, counts: list[int] = COUNTS) -> dict[str, Any]:
    return state_checks.check_state(layer, call, counts, is_control=False)


def test_equal_states_are_at_no_distance(layer: StateLayer, call: StateCall) -> None:
    found = told(layer, call)
    assert (found["compared"], found["error"], found["output_error"]) == (2, 0.0, 0.0)


@pytest.mark.parametrize("head", range(HEADS))
def test_a_small_heads_error_is_not_hidden_by_a_large_head(
    layer: StateLayer, call: StateCall, head: int
) -> None:
    """0.01 % of one head's state of request 1; of the layer's largest value it is 1e-7."""
    layer.state[1 + WINDOW + COUNTS[1] - 1, head] *= 1 + 1e-4
    found = told(layer, call)
    assert found["error"] > 2 * found["allowed"]
    assert (found["head"], found["request"], found["token"]) == (head, 1, COUNTS[1] - 1)


def test_an_error_is_relative_to_what_the_state_was_in_the_window(
    layer: StateLayer, call: StateCall
) -> None:
    """A head that has become much smaller has the rounding of what it was."""
    call.first *= 1e4
    layer.state[:, 2] *= 1 + 1e-3
    found = told(layer, call)
    assert found["error"] < found["allowed"]


def test_nothing_compared_says_so(layer: StateLayer, call: StateCall) -> None:
    call.indices.zero_()
    assert told(layer, call)["compared"] == 0


def test_a_layer_whose_inputs_were_not_seen_has_no_measurements(layer: StateLayer) -> None:
    trace = StateTrace()
    trace.verified(0, torch.zeros(1), torch.zeros(1))
    [found] = state_checks.check_states([layer], trace, COUNTS, is_control=False)
    assert (found["layer"], found["state"], found["convolution"]) == ("net", None, None)


@pytest.mark.parametrize(("factor", "within"), [(1 + 2**-23, True), (1 + 1e-5, False)])
def test_a_small_channels_error_is_not_hidden_by_a_large_channel(
    call: StateCall, monkeypatch: pytest.MonkeyPatch, factor: float, within: bool
) -> None:
    """Behind the convolution, of a channel that is a thousandth of the others."""
    output = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(3))
    output[:, 1] *= 1e-3
    monkeypatch.setattr(state_checks, "_stock_convolution", lambda *_: output)
    call.convolved = output.clone()
    call.convolved[:, 1] *= factor
    kept = torch.zeros(1 + TOKENS, 4, 3)
    call.convolution = kept[[1, 1 + WINDOW]]
    call.mixed = output
    net = StateLayer("net", SimpleNamespace(kv_cache=(kept,)), 0, kept)
    found = state_checks.check_convolution(net, call, REQUESTS)
    assert (found["compared"], found["differing"]) == (2, 0)
    assert (found["output_error"] <= found["output_allowed"]) is within


# Sums of a cache's blocks, which show whether a step has changed another block.


def cache_of(dtype: torch.dtype, width: int) -> torch.Tensor:
    """[blocks, heads, tokens, width], a view with other strides, as vLLM's."""
    bits = torch.randint(-99, 99, (7, 4, 2, width), dtype=torch.int8)
    return bits.to(dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 8), (torch.uint8, 16), (torch.float32, 2), (torch.bfloat16, 6)],
    ids=["bf16", "fp8", "float32", "not aligned to eight bytes"],
)
def test_one_changed_element_changes_the_sum_of_its_block_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    cache = cache_of(dtype, width)
    monkeypatch.setattr(layer_checks, "SUMMED_AT_ONCE", 3 * cache[0].numel())  # in three parts
    before = layer_checks._sums(cache)
    assert torch.equal(layer_checks._sums(cache.clone()), before)
    cache[4, 1, 3, width - 1] += 1
    moved = layer_checks._sums(cache) != before
    assert moved.tolist() == [block == 4 for block in range(7)]
