"""Stage: drafts' rows go to the staging buffer, and nothing else is touched."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import (
    FLOAT_DTYPES,
    SEEDS,
    generator,
    nan_staging,
    num_written,
    random_kv,
)

from nwor_kernels.metadata import ERROR_OVERFLOW, ERROR_ROW_RANGE, error_names
from nwor_kernels.stage.reference import stage_kv_cache_reference

UNTOUCHED = [77, 77]


@examples(60)
@given(
    seed=SEEDS,
    num_tokens=st.integers(1, 12),
    kv_heads=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    spare=st.integers(0, 3),
    fused=st.booleans(),
    strided=st.booleans(),
    dtype=FLOAT_DTYPES,
    data=st.data(),
)
def test_each_row_is_copied_and_padding_is_left_alone(
    seed, num_tokens, kv_heads, widths, spare, fused, strided, dtype, data
):
    rows = data.draw(st.lists(st.integers(-2, num_tokens - 1), max_size=8))
    key, value = random_kv(num_tokens, kv_heads, widths, dtype, generator(seed), fused=fused)
    capacity = len(rows) + spare
    (key_memory, staged_key), (value_memory, staged_value) = (
        nan_staging((capacity, kv_heads, width), dtype, strided) for width in widths
    )
    metadata = torch.tensor(UNTOUCHED, dtype=torch.int32)

    stage_kv_cache_reference(
        key, value, torch.tensor(rows).long(), staged_key, staged_value, metadata
    )

    for i in range(capacity):
        row = rows[i] if i < len(rows) else -1
        for staged, source in ((staged_key, key), (staged_value, value)):
            if row < 0:
                assert staged[i].isnan().all()
            else:
                assert staged[i].double().tolist() == source[row].double().tolist()
    real = sum(row >= 0 for row in rows)
    assert num_written(key_memory) == real * kv_heads * widths[0]
    assert num_written(value_memory) == real * kv_heads * widths[1]
    assert metadata.tolist() == [real, 0]


@pytest.mark.parametrize(
    ("key_rows", "value_rows", "rows", "flag"),
    [
        (4, 4, [0, 1, 2, 3], ERROR_OVERFLOW),
        (4, 4, [-1, -1, -1, -1], ERROR_OVERFLOW),
        (4, 4, [0, 4], ERROR_ROW_RANGE),
        (4, 4, [99, 0], ERROR_ROW_RANGE),
        (4, 3, [0, 3], ERROR_ROW_RANGE),
        (3, 4, [0, 3], ERROR_ROW_RANGE),
        (0, 0, [0], ERROR_ROW_RANGE),
    ],
)
def test_what_does_not_fit_is_flagged_and_nothing_is_staged(key_rows, value_rows, rows, flag):
    staged_key = torch.full((3, 2, 4), float("nan"))
    staged_value = torch.full((3, 2, 4), float("nan"))
    metadata = torch.tensor(UNTOUCHED, dtype=torch.int32)
    key, value = torch.ones(key_rows, 2, 4), torch.ones(value_rows, 2, 4)
    stage_kv_cache_reference(key, value, torch.tensor(rows), staged_key, staged_value, metadata)
    assert metadata.tolist() == [0, flag]
    assert num_written(staged_key) == num_written(staged_value) == 0


def test_flags_read_as_words():
    assert error_names(0) == ""
    assert error_names(1) == "overflow"
    assert error_names(2 | 4) == "row_range+count_mismatch"
    assert error_names(1 | 2 | 4 | 8) == "overflow+row_range+count_mismatch+slot_range"
