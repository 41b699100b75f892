"""Windows and groups: what a kernel run consists of."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from nwor_bench.run.microbench.cases import (
    Heads,
    InputGroup,
    Shape,
    Spec,
    Window,
    expand,
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


def test_attention_has_contexts_of_its_own_up_to_32k() -> None:
    groups = expand(Spec(kernels=("attention",), cache_dtypes=("bf16",), heads=(Heads(32, 8),)))
    assert len(groups) == 4 * 5  # windows, contexts
    assert {group.context for group in groups} == {256, 1024, 4096, 8192, 32768}
    both = Spec(kernels=("attention", "verify_attention"), contexts=(300,))
    assert {group.context for group in expand(both)} == {300}
    assert {group.context for group in expand(Spec())} == {None, 1024}


@given(WINDOWS, st.floats(0.001, 1))
def test_accepted_tokens_are_some_of_the_staged(window: Window, acceptance: float) -> None:
    accepted = InputGroup("commit", "bf16", window, acceptance).accepted
    assert 1 <= accepted <= window.tokens
    assert accepted == 1 or abs(accepted - acceptance * window.tokens) <= 0.5


def test_gated_delta_nets_have_state_dtypes_of_their_own() -> None:
    groups = expand(Spec(kernels=("gated_delta",), windows=(Window(5, 4),)))
    assert [group.cache_dtype for group in groups] == ["f32", "bf16"]
    assert {(group.acceptance, group.context, group.heads) for group in groups} == {(None,) * 3}


@given(st.lists(WINDOWS, min_size=1, unique=True))
def test_windows_are_read_back(windows: list[Window]) -> None:
    assert parse_windows("--windows", ", ".join(map(str, windows))) == tuple(windows)


def test_heads_are_read_back_and_take_the_place_of_the_shapes() -> None:
    few, many = parse_heads("--heads", "6/2, 16/2")
    assert (str(few), str(many)) == ("6/2", "16/2")
    shape = Shape(layers=3, heads=6, kv_heads=3)
    own = InputGroup("verify_attention", "bf16", Window(8, 4), context=9, heads=many).shape(shape)
    assert own == Shape(layers=3, heads=16, kv_heads=2)
    assert InputGroup("commit", "bf16", Window(8, 4), 0.5).shape(shape) is shape


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (parse_windows, ["", ",", "8", "8x", "x4", "8x4x2", "8x0", "0x4", "-8x4", "8x16"]),
        (parse_heads, ["", "24", "24/", "/8", "24/0", "24/7", "8/24", "24/8/1", "a/b"]),
        (parse_acceptances, ["", "0", "1.1", "-0.1", "half", "nan", "inf", "0.5,x"]),
    ],
)
def test_what_is_none_is_refused(parse, texts: list[str]) -> None:
    for text in texts:
        with refused("--flag", value=text):
            parse("--flag", text)


def test_lists_keep_their_order_and_drop_what_comes_twice() -> None:
    assert parse_acceptances("--acceptance", "0.9, 0.1,0.9") == (0.9, 0.1)
