"""Stage in Triton against the torch reference: interpreted, or on a GPU."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import (
    SEEDS,
    assert_same,
    generator,
    nan_staging,
    num_written,
    random_kv,
    to_device,
)

pytest.importorskip("triton")

from nwor_kernels.stage.kernel import stage_kv_cache_triton
from nwor_kernels.stage.reference import stage_kv_cache_reference

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def compare(key, value, rows, capacity, device, *, strided=False):
    """Both implementations on NaN buffers; returns the metadata that both wrote."""
    results = []
    for stage, where in (
        (stage_kv_cache_reference, torch.device("cpu")),
        (stage_kv_cache_triton, device),
    ):
        to_key, to_value = (
            nan_staging((capacity, *source.shape[1:]), source.dtype, strided, where)
            for source in (key, value)
        )
        metadata = torch.full((2, 3), 77, dtype=torch.int32, device=where)
        inputs = (to_device(tensor, where) for tensor in (key, value, torch.tensor(rows).long()))
        stage(*inputs, to_key[1], to_value[1], metadata[1, ::2])
        results.append((to_key[0].cpu(), to_value[0].cpu(), metadata.cpu()))
    for expected, actual in zip(*results, strict=True):
        assert_same(actual, expected)
    if results[0][2][1, 2]:
        assert num_written(results[1][0]) == num_written(results[1][1]) == 0
    return results[1][2][1, ::2].tolist()


@examples(30)
@given(
    seed=SEEDS,
    num_tokens=st.integers(1, 12),
    kv_heads=st.integers(1, 3),
    widths=st.sampled_from([(64, 64), (96, 96), (128, 128), (3, 5), (24, 16)]),
    spare=st.integers(0, 3),
    fused=st.booleans(),
    strided=st.booleans(),
    dtype=DTYPES,
    data=st.data(),
)
def test_any_window_is_staged_as_by_the_reference(
    triton_device,
    seed,
    num_tokens,
    kv_heads,
    widths,
    spare,
    fused,
    strided,
    dtype,
    data,
):
    rows = data.draw(st.lists(st.integers(-2, num_tokens - 1), max_size=8))
    key, value = random_kv(num_tokens, kv_heads, widths, dtype, generator(seed), fused=fused)
    metadata = compare(
        key,
        value,
        rows,
        len(rows) + spare,
        triton_device,
        strided=strided,
    )
    assert metadata == [sum(row >= 0 for row in rows), 0]


@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "head_dim"),
    [
        pytest.param(5, 10, 256, id="a row wider than a program"),
        pytest.param(40, 8, 128, id="more rows than one warp checks"),
        pytest.param(1100, 1, 4, id="more rows than one pass checks"),
    ],
)
def test_large_windows(triton_device, num_rows, kv_heads, head_dim):
    rng = generator(num_rows)
    key, value = random_kv(30, kv_heads, (head_dim, head_dim), torch.bfloat16, rng, fused=True)
    rows = torch.randint(-1, 30, (num_rows,), generator=rng)
    compare(key, value, rows.tolist(), num_rows, triton_device)
    rows[-1] = 30  # the last entry is out of range: the first programs must know
    assert compare(key, value, rows.tolist(), num_rows, triton_device) == [0, 2]


@pytest.mark.parametrize(
    ("key_rows", "value_rows", "rows"),
    [
        (4, 4, [0, 1, 2, 3]),
        (4, 4, [-1, -1, -1, -1]),
        (4, 4, [9, 9, 9, 9]),
        (4, 4, [0, 4]),
        (4, 4, [99, 0]),
        (4, 3, [0, 3]),
        (3, 4, [0, 3]),
        (0, 0, [0]),
        (0, 0, [-1]),
        (4, 4, []),
        (4, 4, [3, 0, 3]),
    ],
)
def test_what_does_not_fit_is_flagged_as_by_the_reference(
    triton_device, key_rows, value_rows, rows
):
    key, value = torch.ones(key_rows, 2, 4), torch.ones(value_rows, 2, 4)
    compare(key, value, rows, 3, triton_device)
