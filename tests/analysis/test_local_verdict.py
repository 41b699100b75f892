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


def test_sound_layers_are_within_rounding() -> None:
    found = local_result([[window(layer(), layer("layer 1"))], [window(layer(), layer("layer 1"))]])
    assert found.verdict is KvVerdict.WITHIN
    assert (found.windows, found.layers, found.attended, found.ranks) == (1, 2, 2, 2)
    assert (found.written, found.rejected) == (48, 3)
    assert found.nearest is not None
    assert 0 < found.nearest < 1


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"apart": 5 * 4e-3 + 1e-5}, "distance from stock's"),
        ({"ours": 2 * 2e-3 + 1e-6}, "root mean square"),
        ({"gain": 9 * 2e-5 + 2 * 1e-5 + 1e-7}, "along the right output"),
        ({"scale": -(9 * 1e-4 + 2 * 2e-5 + 1e-7), "scale_error": 1e-4}, "softmax scale"),
        ({"scale": 2e-3 / 4 + 1e-7}, "softmax scale"),  # a quarter of stock's root mean square
        ({"apart": None}, "not a finite number"),
    ],
)
def test_an_error_beyond_its_limit_breaks_the_cell(head: dict[str, Any], words: str) -> None:
    found = local_result([[window(layer(), layer("layer 1", head))]])
    assert found.verdict is KvVerdict.BROKEN
    assert found.reason is not None
    assert words in found.reason
    assert "layer 1, head 1" in found.reason


def test_a_scale_within_a_share_of_stocks_rounding_is_right_however_small_its_standard_error() -> (
    None
):
    """Rows of one request share keys and values: 9.3 standard errors were seen of a sound head."""
    head = {"scale": 2e-3 / 4 - 1e-7, "scale_error": 1e-7, "stock_scale": 0.0}
    assert local_result([[window(layer(), layer("layer 1", head))]]).verdict is KvVerdict.WITHIN


def test_a_scale_wrong_in_every_head_is_seen_in_all_heads_together() -> None:
    wrong = layer("layer 1")
    wrong["attention"]["pooled"][3] = 7 * 3e-5 + 2 * 2e-5 + 1e-7
    found = local_result([[window(layer(), wrong)]])
    assert found.reason is not None
    assert "layer 1: the error of the softmax scale" in found.reason


def test_exact_faults_need_no_size() -> None:
    written = layer(differing=1, first_differing=[2, 4, 0])
    assert "head 0 of row 4 of request 2" in str(local_result([[window(written)]]).reason)
    changed = layer(strangers=2, first_stranger=[17, -1])
    assert "first in block 17" in str(local_result([[window(changed)]]).reason)


def test_attention_that_did_not_read_the_staged_rows_is_a_fault() -> None:
    found = local_result([[window(layer(), layer("layer 1", attention={"missing": True}))]])
    assert found.verdict is KvVerdict.BROKEN
    assert "layer 1: attention did not read the staged rows" in str(found.reason)


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


def test_nothing_checked_is_not_run() -> None:
    assert local_result([[]]).verdict is KvVerdict.NOT_RUN
    unlike = layer("layer 1", {"stock": 0.5, "stock_largest": 0.9})
    found = local_result([[window(unlike)]])
    assert found.verdict is KvVerdict.NOT_RUN
    assert "layer 1" in str(found.reason)


def test_attention_that_is_stocks_in_every_mode_counts_apart() -> None:
    found = local_result([[window(layer(attention=None), layer("layer 1", attention=None))]])
    assert (found.verdict, found.layers, found.attended) == (KvVerdict.WITHIN, 2, 0)


SOUND_STATE = {
    "requests": 4, "compared": 8,
    "error": 3e-7, "allowed": 1e-6, "request": 1, "token": 2, "head": 5,
    "output_error": 4e-3, "output_allowed": 2**-6, "output_head": 3,
}  # fmt: skip


SOUND_CONVOLUTION = {
    "compared": 4, "differing": 0, "request": 0, "output_error": 1e-3, "output_allowed": 2**-6,
}  # fmt: skip


def test_layers_with_states_are_counted_by_themselves() -> None:
    net = {"layer": "net", "state": SOUND_STATE, "convolution": SOUND_CONVOLUTION}
    other = {**net, "layer": "other"}
    beside_prefill, alone = window(layer()), window(layer(), net, other)
    found = local_result([[beside_prefill, alone, alone]])
    assert found.verdict is KvVerdict.WITHIN
    assert (found.layers, found.states, found.attended) == (1, 2, 1)
    assert (found.convolutions, found.state_requests) == (2, 4)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"state": None}, "net's state"),
        ({"state": {**SOUND_STATE, "compared": 0, "error": 0.0}}, "net's state"),
        ({"convolution": None}, "net's convolution"),
        ({"convolution": {**SOUND_CONVOLUTION, "compared": 0}}, "net's convolution"),
    ],
)
def test_states_of_which_nothing_was_compared_are_no_pass(
    changed: dict[str, Any], words: str
) -> None:
    net = {"layer": "net", "state": SOUND_STATE, "convolution": SOUND_CONVOLUTION}
    empty = window(layer(), {**net, **changed})
    for ranks in ([[empty]], [[window(layer(), net)], [empty]]):
        found = local_result(ranks)
        assert found.verdict is KvVerdict.NOT_RUN
        assert f"nothing was compared of {words}" in str(found.reason)
    assert local_result([[empty, window(layer(), net)]]).verdict is KvVerdict.WITHIN


def test_a_layer_without_rows_and_a_rank_without_windows_are_no_pass() -> None:
    no_rows = layer()
    no_rows["attention"]["rows"] = 0
    for empty, words in ((layer(written=0), "layer 0's write"), (no_rows, "layer 0's attention")):
        found = local_result([[window(empty)]])
        assert (found.verdict, words in str(found.reason)) == (KvVerdict.NOT_RUN, True)
    found = local_result([[window(layer())], []])
    assert found.verdict is KvVerdict.NOT_RUN
    assert "on rank 1" in str(found.reason)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"error": 1.1e-6}, "net, head 5 of request 1, token 2: the distance of a recurrent state"),
        ({"error": None}, "not a finite number"),
        ({"output_error": 0.02}, "net, head 3: the distance of outputs"),
    ],
)
def test_a_state_beyond_its_limit_breaks_the_cell(wrong: dict[str, Any], words: str) -> None:
    state = {**SOUND_STATE, **wrong}
    found = local_result([[window(layer(), {"layer": "net", "state": state})]])
    assert found.verdict is KvVerdict.BROKEN
    assert words in (found.reason or "")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"differing": 3, "request": 2}, "net, first in request 2: 3 elements of convolution"),
        ({"output_error": 0.02}, "net: the distance of the convolution's output"),
        ({"output_error": None}, "not a finite number"),
    ],
)
def test_a_convolution_that_is_not_stocks_is_named(wrong: dict[str, Any], words: str) -> None:
    convolution = {**SOUND_CONVOLUTION, **wrong}
    # What follows from it in the layer's state is not named first.
    state = {**SOUND_STATE, "error": 0.5, "output_error": 1e-3}
    net = {"layer": "net", "state": state, "convolution": convolution}
    found = local_result([[window(layer(), net)]])
    assert found.verdict is KvVerdict.BROKEN
    if wrong.get("differing"):
        assert words in (found.reason or "")
    net["state"] = SOUND_STATE
    assert words in (local_result([[window(layer(), net)]]).reason or "")
