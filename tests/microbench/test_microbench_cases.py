"""Windows, groups and bytes: what a kernel run consists of."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.microbench.cases import (
    NETS,
    Group,
    Shape,
    Spec,
    Window,
    bytes_moved,
    expand,
    net_bytes,
    parse_acceptances,
    parse_heads,
    parse_windows,
)

WINDOWS = st.builds(Window, st.integers(1, 9999), st.integers(1, 15))


def test_the_default_run_has_every_case_that_was_asked_for() -> None:
    groups = expand(Spec())
    assert len(set(groups)) == len(groups)
    assert Counter(group.kernel for group in groups) == {
        "commit": 4 * 3 * 2,  # windows, acceptances, cache dtypes
        "verify_attention": 4 * 2 * 2,  # and heads
    }
    assert {str(group.window) for group in groups} == {"8x4", "64x4", "64x8", "256x8"}
    ratios = {each.query // each.kv for group in groups if (each := group.heads)}
    assert ratios == {3, 8}


@given(WINDOWS, st.floats(0.001, 1))
def test_accepted_tokens_are_some_of_the_staged(window: Window, acceptance: float) -> None:
    accepted = Group("commit", "bf16", window, acceptance).accepted
    assert 1 <= accepted <= window.tokens
    assert accepted == 1 or abs(accepted - acceptance * window.tokens) <= 0.5


def test_bytes_of_each_kernel() -> None:
    shape, window = Shape(layers=3, kv_heads=2, head_dim=64, heads=4), Window(5, 4)
    row = 2 * 2 * 64 * 2  # K and V of two heads of 64 in bf16
    assert bytes_moved(Group("commit", "bf16", window, 0.5), shape) == 3 * 10 * (row + row)
    assert bytes_moved(Group("commit", "fp8", window, 0.5), shape) == 3 * 10 * (row + row // 2)
    attention = bytes_moved(Group("verify_attention", "fp8", window, context=100), shape)
    assert attention == 5 * 100 * row // 2 + 25 * row


def test_gated_delta_nets_have_state_dtypes_of_their_own() -> None:
    groups = expand(Spec(kernels=("gated_delta",), windows=(Window(5, 4),)))
    assert [group.label for group in groups] == ["gated_delta 5x4 f32", "gated_delta 5x4 bf16"]


def test_a_window_of_nets_writes_one_state_or_one_a_token() -> None:
    group = Group("gated_delta", "bf16", Window(5, 4))
    one, all_tokens = (net_bytes(group, NETS, states_written=count) for count in (1, 5))
    state = 32 * 128 * 128 * 2
    assert all_tokens - one == 36 * 5 * 4 * state
    assert one - 36 * 5 * 2 * state == 36 * 25 * (8192 + 4096) * 2  # inputs and outputs
    assert bytes_moved(group, Shape()) == one


@given(st.lists(WINDOWS, min_size=1, unique=True))
def test_windows_are_read_back(windows: list[Window]) -> None:
    assert parse_windows(", ".join(map(str, windows))) == tuple(windows)


@pytest.mark.parametrize("text", ["", ",", "8", "8x", "x4", "8x4x2", "8x0", "0x4", "-8x4", "8x16"])
def test_windows_that_are_none_are_refused(text: str) -> None:
    with refused("--windows", value=text):
        parse_windows(text)


def test_heads_are_read_back_and_take_the_place_of_the_shapes() -> None:
    few, many = parse_heads("6/2, 16/2")
    assert (str(few), str(many)) == ("6/2", "16/2")
    shape = Shape(layers=3, heads=6, kv_heads=3)
    own = Group("verify_attention", "bf16", Window(8, 4), context=9, heads=many).shape(shape)
    assert own == Shape(layers=3, heads=16, kv_heads=2)
    assert Group("commit", "bf16", Window(8, 4), 0.5).shape(shape) is shape


@pytest.mark.parametrize("text", ["", "24", "24/", "/8", "24/0", "24/7", "8/24", "24/8/1", "a/b"])
def test_heads_that_are_none_are_refused(text: str) -> None:
    with refused("--heads", value=text):
        parse_heads(text)


@pytest.mark.parametrize("text", ["", "0", "1.1", "-0.1", "half", "nan", "inf", "0.5,x"])
def test_acceptances_that_are_none_are_refused(text: str) -> None:
    with refused("--acceptance", value=text):
        parse_acceptances(text)


def test_lists_keep_their_order_and_drop_what_comes_twice() -> None:
    assert parse_acceptances("0.9, 0.1,0.9") == (0.9, 0.1)
