"""Stage, by reference and in Triton: drafts' rows are copied, and nothing else is touched."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, assert_same, generator, nan_staging, random_kv, to_device

pytest.importorskip("triton")

from nwor_kernels.metadata import ERROR_OVERFLOW, ERROR_ROW_RANGE, error_names
from nwor_kernels.stage.kernel import stage_kv_cache_triton
from nwor_kernels.stage.reference import stage_kv_cache_reference


def check(on_triton, key, value, rows, capacity, flag=0, *, strided=False):
    """Stage into NaN buffers, and compare all memory with a loop over the rows."""
    stage = stage_kv_cache_triton if on_triton else stage_kv_cache_reference
    device = on_triton or torch.device("cpu")
    buffers = [
        nan_staging((capacity, *kv.shape[1:]), kv.dtype, strided, device) for kv in (key, value)
    ]
    metadata = torch.full((2, 3), 77, dtype=torch.int32, device=device)
    inputs = (to_device(tensor, device) for tensor in (key, value, torch.tensor(rows).long()))
    stage(*inputs, *(view for _, view in buffers), metadata[1, ::2])
    copied = [] if flag else [(i, row) for i, row in enumerate(rows) if row >= 0]
    assert metadata.tolist() == [[77] * 3, [len(copied), 77, flag]]
    for source, (memory, _) in zip((key, value), buffers, strict=True):
        expected, view = nan_staging((capacity, *source.shape[1:]), source.dtype, strided)
        for i, row in copied:
            view[i] = source[row]
        assert_same(memory.cpu(), expected)


@examples(40)
@given(
    seed=SEEDS,
    num_tokens=st.integers(1, 12),
    kv_heads=st.integers(1, 3),
    widths=st.sampled_from([(64, 64), (96, 96), (128, 128), (3, 5), (24, 16)]),
    spare=st.integers(0, 3),
    fused=st.booleans(),
    strided=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_any_window(
    on_triton, seed, num_tokens, kv_heads, widths, spare, fused, strided, dtype, data
):
    rows = data.draw(st.lists(st.integers(-2, num_tokens - 1), max_size=8))
    key, value = random_kv(num_tokens, kv_heads, widths, dtype, generator(seed), fused=fused)
    check(on_triton, key, value, rows, len(rows) + spare, strided=strided)


@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "head_dim"),
    [
        pytest.param(5, 10, 256, id="a row wider than a program"),
        pytest.param(40, 8, 128, id="more rows than one warp checks"),
        pytest.param(1100, 1, 4, id="more rows than one pass checks"),
    ],
)
def test_large_windows(on_triton, num_rows, kv_heads, head_dim):
    rng = generator(num_rows)
    key, value = random_kv(30, kv_heads, (head_dim, head_dim), torch.bfloat16, rng, fused=True)
    rows = torch.randint(-1, 30, (num_rows,), generator=rng).tolist()
    check(on_triton, key, value, rows, num_rows)
    rows[-1] = 30  # the last entry is out of range: the first programs must know
    check(on_triton, key, value, rows, num_rows, ERROR_ROW_RANGE)


@pytest.mark.parametrize(
    ("key_rows", "value_rows", "rows", "flag"),
    [
        (4, 4, [0, 1, 2, 3], ERROR_OVERFLOW),
        (4, 4, [-1, -1, -1, -1], ERROR_OVERFLOW),
        (4, 4, [9, 9, 9, 9], ERROR_OVERFLOW),
        (4, 4, [0, 4], ERROR_ROW_RANGE),
        (4, 4, [99, 0], ERROR_ROW_RANGE),
        (4, 3, [0, 3], ERROR_ROW_RANGE),
        (3, 4, [0, 3], ERROR_ROW_RANGE),
        (0, 0, [0], ERROR_ROW_RANGE),
        (0, 0, [-1], 0),
        (4, 4, [], 0),
        (4, 4, [3, 0, 3], 0),
    ],
)
def test_what_does_not_fit_is_flagged(on_triton, key_rows, value_rows, rows, flag):
    key, value = torch.ones(key_rows, 2, 4), torch.ones(value_rows, 2, 4)
    check(on_triton, key, value, rows, 3, flag)


def test_flags_read_as_words():
    words = {0: "", 1: "overflow", 6: "row_range+count_mismatch", 8: "slot_range"}
    assert {flags: error_names(flags) for flags in words} == words
