"""How a verification launch is shaped, and what it does not serve."""

import pytest
import torch

pytest.importorskip("triton")
from nwor_kernels.verify_attention.tuning import (
    Tiling,
    fastest_tiling,
    pipeline,
    programs_on,
    row_tiling,
    unsupported_reason,
)


@pytest.mark.parametrize(
    ("rows", "dim", "cache_bytes", "kib", "chosen"),
    [
        (16, 64, 2, 227, (64, 3)),
        (16, 128, 2, 227, (32, 3)),
        (64, 256, 4, 227, (32, 2)),  # 3 stages took 232 KiB
        (16, 512, 2, 227, (32, 3)),
        (16, 512, 1, 227, (32, 3)),
        (16, 512, 4, 227, (32, 2)),
        (16, 512, 2, 99, (16, 2)),  # an sm_89's
        (16, 512, 4, 164, (16, 2)),  # an A100's: the least that there is
    ],
)
def test_steps_and_stages_fit_the_shared_memory(rows, dim, cache_bytes, kib, chosen):
    assert pipeline(rows, dim, cache_bytes, kib * 1024) == chosen


@pytest.mark.parametrize(
    ("rows", "dim", "pairs", "programs"),
    [
        (64, 128, None, 264),
        (64, 128, 64, 264),
        (64, 128, 32, 132),
        (16, 128, 32, 264),  # small parts are cheap to merge
        (64, 256, 64, 132),
    ],
)
def test_few_pairs_are_not_cut_into_many_parts(rows, dim, pairs, programs):
    assert programs_on(132, rows, dim, pairs) == programs


@pytest.mark.parametrize(
    ("ratio", "dim", "rows", "tiles"),
    [(3, 128, 16, 1), (4, 128, 64, 1), (8, 64, 64, 1), (16, 128, 128, 1), (8, 512, 16, 3)],
)
def test_query_rows_fill_a_matrix_instruction(ratio, dim, rows, tiles):
    assert row_tiling(5, ratio, dim) == (rows, tiles, dim)


def test_what_is_not_served_has_a_word():
    bf16 = torch.bfloat16
    for served, word in (
        ((128, 5, bf16, bf16), None),
        ((128, 5, bf16, torch.uint8), None),
        ((512, 5, bf16, bf16), None),
        ((520, 5, bf16, bf16), "head_dim_520"),
        ((192, 5, bf16, bf16, 128), None),
        ((128, 5, bf16, bf16, 1024), "head_dim_1024"),
        ((128, 17, bf16, bf16), "window_of_17_tokens"),
        ((128, 5, torch.float64, torch.float64), "dtype_float64"),
        ((128, 5, bf16, torch.float32), "cache_dtype_float32"),
    ):
        assert unsupported_reason(*served) == word


def test_the_table_for_steps_that_were_not_measured():
    """What won on an H200 (132 multiprocessors), of 8 K/V heads and of head dims 128 and 256."""
    for queries, cache_bytes, requests, head_dim, expected in (
        (5, 2, 8, 128, Tiling.USUAL),
        (5, 2, 64, 128, Tiling.FOUR_PROGRAMS),
        (5, 1, 256, 128, Tiling.FOUR_PROGRAMS),
        (5, 2, 64, 256, Tiling.USUAL),
        (9, 2, 64, 128, Tiling.USUAL),
        (9, 1, 8, 128, Tiling.ROWS_32),
    ):
        found = fastest_tiling(queries, 3, head_dim, cache_bytes, requests * 8, 132)
        assert found is expected, (queries, cache_bytes, requests, head_dim)
    assert fastest_tiling(5, 8, 128, 1, 512, 132) is Tiling.USUAL
