"""Verify and commit of gated delta windows in Triton: interpreted, or on a GPU."""

import pytest
import torch
from examples import examples
from gated_delta_cases import Shape, make_case
from gated_delta_checks import check_window
from gated_delta_drift import LARGEST, check_drift
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import INTERPRETED, SEEDS

pytest.importorskip("triton")

from nwor_kernels.gated_delta.launch import StateCommit, refusal, verify_window_triton

SMALL = Shape(key_dim=16, value_dim=32)


def commit_in_one_launch(states, groups, tables, accepted, committed, records):
    """The commit's arguments as the reference takes them."""
    StateCommit(states, groups, tables, records)(accepted, committed)


def check(case, seed, device, norm=None):
    check_window(case.to_device(device), verify_window_triton, commit_in_one_launch, seed, norm)


@examples(12)
@given(
    seed=SEEDS,
    window=st.integers(1, 11),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    state_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    norm=st.sampled_from([None, "silu", "sigmoid"]),
    data=st.data(),
)
def test_any_window(triton_device, seed, window, dtype, state_dtype, norm, data):
    lengths = data.draw(st.lists(st.integers(0, window), min_size=1, max_size=3))
    null_rows = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=1))
    holes = null_rows if window > 1 and data.draw(st.booleans()) else ()
    null_rows = () if holes else null_rows
    case = make_case(
        seed, lengths, window, shape=SMALL, dtype=dtype, state_dtype=state_dtype, groups=(1, 0),
        null_rows=null_rows,
        holes=holes,
    )  # fmt: skip
    check(case, seed, triton_device, norm)


@pytest.mark.parametrize(
    ("lengths", "window", "shape"),
    [
        pytest.param([16, 3], 16, SMALL, id="the longest window"),
        pytest.param([9], 9, SMALL, id="more tokens than a product's half"),
        pytest.param([3, 3], 3, Shape(1, 3, 16, 128), id="a head in two programs"),
        pytest.param([2, 0, 5], 5, Shape(2, 2, 64, 16), id="one value head a key head"),
    ],
)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_shapes(triton_device, lengths, window, shape, state_dtype):
    case = make_case(5, lengths, window, shape=shape, state_dtype=state_dtype)
    check(case, 5, triton_device)
    check(case, 5, triton_device, "silu")


def test_accepted_counts_that_no_window_has_are_null(triton_device):
    case = make_case(3, [3, 3, 3], 3, shape=SMALL, accepted=[1, 2, 3]).to_device(triton_device)
    case.accepted[:2] = torch.tensor([0, 6], dtype=torch.int32)
    case.tables[0].fill_(1)  # a slot, were it read
    case.states[0][1] = 1.0
    before, out, records = case.pages.clone(), case.nan_out(torch.float32), case.nan_records()
    verify_window_triton(case.layer_inputs(0), out, records.layer(0), scale=case.shape.scale)
    assert not bool(out[:6].any())
    committed = torch.tensor([1, 1, 0], dtype=torch.int32, device=triton_device)
    StateCommit(case.states, [0], case.tables, records)(case.accepted, committed)
    torch.testing.assert_close(case.pages, before, rtol=0, atol=0, equal_nan=True)


SERVED = {
    "key_heads": 16,
    "value_heads": 32,
    "key_dim": 128,
    "value_dim": 128,
    "window": 5,
    "dtype": torch.bfloat16,
    "state_dtype": torch.float32,
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"window": 17}, "17 tokens"),
        ({"value_heads": 24}, "24 value heads"),
        ({"key_dim": 96}, "key head size 96"),
        ({"value_dim": 8}, "value head size 8"),
        ({"dtype": torch.float32}, "activations in torch.float32"),
        ({"state_dtype": torch.float64}, "states in torch.float64"),
    ],
)
def test_refusals(changed, named):
    reason = refusal(**{**SERVED, **changed})
    assert reason is None if named is None else named in reason


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"groups": [0]}, "1 groups"),
        ({"tables": "int64"}, "int32"),
        ({"states": "mixed"}, "must share dtype"),
    ],
)
def test_layers_that_one_launch_cannot_serve(wrong, named):
    case = make_case(1, [2], 2, shape=SMALL, groups=(0, 0))
    states, tables = case.states, case.tables
    if "states" in wrong:
        states = [states[0], states[1].to(torch.bfloat16)]
    if "tables" in wrong:
        tables = [table.long() for table in tables]
    with pytest.raises(ValueError, match=named):
        StateCommit(states, wrong.get("groups", case.groups), tables, case.nan_records())


@pytest.mark.long
@pytest.mark.parametrize(
    "state_dtype",
    [torch.float32] if INTERPRETED else list(LARGEST),  # the interpreter truncates to bfloat16
)
def test_errors_of_long_outputs(triton_device, state_dtype):
    check_drift(state_dtype, 1, verify_window_triton, commit_in_one_launch, triton_device)
