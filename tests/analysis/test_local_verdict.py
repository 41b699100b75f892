"""The local gate's verdict on what its workers measured."""

from typing import Any

import pytest

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.analysis.parity.local import local_result
from nwor_bench.plugin.observe.errors import FIELDS

SOUND_HEAD = dict(
    zip(FIELDS, (2e-3, 2e-3, 4e-3, 4e-3, 5e-3, 3, 1e-5, 2e-5, 1e-5, 2e-5, 4e-5, 2e-5), strict=True)
)


def layer(name: str = "layer 0", head: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """What is measured of a layer with two heads; `head` changes its second one."""
    heads = [list(SOUND_HEAD.values()), list({**SOUND_HEAD, **(head or {})}.values())]
    attention = {
        "fields": list(FIELDS), "heads": heads, "pooled": [1e-5, 1e-5, 1e-5, 2e-5, 3e-5, 2e-5],
        "rows": 20, "requests": [0] * 5 + [1] * 5,
    }  # fmt: skip
    exact = {"written": 12, "differing": 0, "first_differing": None, "strangers": 0}
    return {"layer": name, **exact, "first_stranger": None, "attention": attention, **more}


def window(*layers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A window that was checked."""
    facts = {"path": "full graph", "rejected": 3, "whole_caches": 2, "seconds": 0.1}
    graphs = {"repeated": 0, "checking": 0}
    return {**facts, "graphs": graphs, "layers": list(layers), **more}


BROKEN, NOT_RUN, WITHIN = KvVerdict.BROKEN, KvVerdict.NOT_RUN, KvVerdict.WITHIN


def test_sound_layers_are_within_rounding() -> None:
    found = local_result([[window(layer(), layer("layer 1"))], [window(layer(), layer("layer 1"))]])
    assert found.verdict is WITHIN
    assert (found.windows, found.layers, found.attended, found.ranks) == (1, 2, 2, 2)
    assert (found.written, found.rejected) == (48, 3)
    assert found.nearest is not None
    assert 0 < found.nearest < 1
    # Attention that is stock's in every mode counts apart.
    found = local_result([[window(layer(attention=None), layer("layer 1", attention=None))]])
    assert (found.verdict, found.layers, found.attended) == (WITHIN, 2, 0)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"apart": 5 * 4e-3 + 1e-5}, "distance from stock's"),
        ({"ours": 2 * 2e-3 + 1e-6}, "root mean square"),
        ({"ours": 1.6e-7, "stock": 0.7e-7, "scale": 0.0}, None),  # float32 on an H100
        ({"ours": 4 * 2.0**-24 + 1e-9, "stock": 0.7e-7, "scale": 0.0}, "root mean square"),
        ({"gain": 9 * 2e-5 + 2 * 1e-5 + 1e-7}, "along the right output"),
        ({"scale": -(9 * 1e-4 + 2 * 2e-5 + 1e-7), "scale_error": 1e-4}, "softmax scale"),
        ({"scale": 2e-3 / 4 + 1e-7}, "softmax scale"),  # a quarter of stock's root mean square
        ({"apart": None}, "not a finite number"),
        # Rows of one request share keys and values: 9.3 standard errors were seen of a sound head.
        ({"scale": 2e-3 / 4 - 1e-7, "scale_error": 1e-7, "stock_scale": 0.0}, None),
    ],
)
def test_an_error_beyond_its_limit_breaks_the_cell(head: dict[str, Any], words: str | None) -> None:
    found = local_result([[window(layer(), layer("layer 1", head))]])
    assert found.verdict is (WITHIN if words is None else BROKEN)
    if words is not None:
        assert words in str(found.reason)
        assert "layer 1, head 1" in str(found.reason)


def pooled() -> dict[str, Any]:
    """A layer whose scale is a little wrong in every head."""
    wrong = layer("layer 1")
    wrong["attention"]["pooled"][3] = 7 * 3e-5 + 2 * 2e-5 + 1e-7
    return wrong


def no_rows() -> dict[str, Any]:
    made = layer("layer 1")
    made["attention"]["rows"] = 0
    return made


@pytest.mark.parametrize(
    ("second", "verdict", "words"),
    [
        (pooled(), BROKEN, "layer 1: the error of the softmax scale"),
        (layer("layer 1", differing=1, first_differing=[2, 4, 0]), BROKEN,
         "head 0 of row 4 of request 2"),
        (layer("layer 1", strangers=2, first_stranger=[17, -1]), BROKEN, "first in block 17"),
        (layer("layer 1", attention={"missing": True}), BROKEN,
         "layer 1: attention did not read the staged rows"),
        (layer("layer 1", {"stock": 0.5, "stock_largest": 0.9}), NOT_RUN, "layer 1"),
        (layer("layer 1", written=0), NOT_RUN, "layer 1's write"),
        (no_rows(), NOT_RUN, "layer 1's attention"),
    ],
)  # fmt: skip
def test_a_layer_that_is_wrong_or_was_not_checked(
    second: dict[str, Any], verdict: KvVerdict, words: str
) -> None:
    found = local_result([[window(layer(), second)]])
    assert found.verdict is verdict
    assert words in str(found.reason)


def test_a_rank_without_windows_is_no_pass() -> None:
    assert local_result([[]]).verdict is NOT_RUN
    found = local_result([[window(layer())], []])
    assert found.verdict is NOT_RUN
    assert "on rank 1" in str(found.reason)


def test_graphs_must_agree_only_if_the_timed_one_repeats_itself() -> None:
    unsteady = window(layer(), graphs={"repeated": 4, "checking": 4})
    assert local_result([[unsteady]]).verdict is KvVerdict.NOT_RUN
    assert "the timed graph's output" in str(local_result([[unsteady]]).reason)
    assert local_result([[unsteady]]).graphs_equal is None
    assert local_result([[unsteady, window(layer())]]).verdict is KvVerdict.WITHIN
    other = window(layer(), graphs={"repeated": 0, "checking": 4})
    assert local_result([[other]]).verdict is KvVerdict.BROKEN
    same = window(layer(), graphs={"repeated": 0, "checking": 0})
    assert local_result([[same]]).graphs_equal is True


def test_the_lowest_layer_and_the_rank_are_named() -> None:
    sound, late = layer(), layer("layer 1", {"ours": 1.0})
    early = layer("layer 0", {"ours": 0.01})
    found = local_result([[window(sound, layer("layer 1"))], [window(early, late)]])
    assert found.reason is not None
    assert found.reason.startswith("local gate: layer 0 on rank 1, head 1")


STATE = {
    "requests": 4, "compared": 8,
    "error": 3e-7, "allowed": 1e-6, "request": 1, "token": 2, "head": 5,
    "output_error": 4e-3, "output_allowed": 2**-6, "output_head": 3,
}  # fmt: skip

CONVOLUTION = {
    "compared": 4, "differing": 0, "request": 0, "output_error": 1e-3, "output_allowed": 2**-6,
}  # fmt: skip


def net(state: Any = (), convolution: Any = (), name: str = "net") -> dict[str, Any]:
    """A layer with states: parts with these fields changed, or None."""
    return {
        "layer": name,
        "state": None if state is None else {**STATE, **dict(state)},
        "convolution": None if convolution is None else {**CONVOLUTION, **dict(convolution)},
    }


def test_graphs_that_could_not_run_again_for_want_of_memory_say_how_much() -> None:
    full = {"path": "full graph", "graphs": None, "copies_need": 5_500_000_000}
    reason = "nothing was compared of the timed graph's output: copies of its states take 5.5 GB, "
    assert local_result([[window(layer(), **full)]]).reason == f"{reason}so give the cache less"
    alone = window(layer(), path="full graph")
    assert local_result([[window(layer(), **full), alone]]).verdict is WITHIN  # another had room


def test_layers_with_states_are_counted_by_themselves() -> None:
    beside_prefill, alone = window(layer()), window(layer(), net(), net(name="other"))
    found = local_result([[beside_prefill, alone, alone]])
    assert found.verdict is WITHIN
    assert (found.layers, found.states, found.attended) == (1, 2, 1)
    assert (found.convolutions, found.state_requests) == (2, 4)


@pytest.mark.parametrize(
    ("empty", "words"),
    [
        (net(state=None), "net's state"),
        (net({"compared": 0, "error": 0.0}), "net's state"),
        (net(convolution=None), "net's convolution"),
        (net(convolution={"compared": 0}), "net's convolution"),
    ],
)
def test_states_of_which_nothing_was_compared_are_no_pass(
    empty: dict[str, Any], words: str
) -> None:
    unseen, seen = window(layer(), empty), window(layer(), net())
    for ranks in ([[unseen]], [[seen], [unseen]]):
        found = local_result(ranks)
        assert found.verdict is NOT_RUN
        assert f"nothing was compared of {words}" in str(found.reason)
    assert local_result([[unseen, seen]]).verdict is WITHIN


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (net({"error": 1.1e-6}),
         "net, head 5 of request 1, token 2: the distance of a recurrent state"),
        (net({"error": None}), "not a finite number"),
        (net({"output_error": 0.02}), "net, head 3: the distance of outputs"),
        # What follows from a convolution in its layer's state is not named first.
        (net({"error": 0.5}, {"differing": 3, "request": 2}),
         "net, first in request 2: 3 elements of convolution"),
        (net(convolution={"output_error": 0.02}),
         "net: the distance of the convolution's output"),
        (net(convolution={"output_error": None}), "not a finite number"),
    ],
)  # fmt: skip
def test_a_state_or_convolution_beyond_its_limit_is_named(
    wrong: dict[str, Any], words: str
) -> None:
    found = local_result([[window(layer(), wrong)]])
    assert found.verdict is BROKEN
    assert words in str(found.reason)
