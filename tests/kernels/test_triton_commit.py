"""Commit from staging buffers in Triton against the torch reference: interpreted, or on a GPU."""

from dataclasses import dataclass

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import (
    CACHE_LAYOUTS,
    SEEDS,
    StagedWindow,
    assert_same,
    generator,
    nan_caches,
    num_written,
)
from torch import Tensor

pytest.importorskip("triton")

from nwor_kernels.commit.plan import CommitPlan
from nwor_kernels.commit.reference import commit_staged_kv_cache_reference
from nwor_kernels.commit.sources import StagedSources
from nwor_kernels.metadata import ERROR_COUNT_MISMATCH, ERROR_OVERFLOW, ERROR_SLOT_RANGE


@dataclass(frozen=True)
class Shape:
    """A window's shape; the caches have just enough slots for every row, and one block more."""

    rows: int = 6
    layers: int = 3
    kv_heads: int = 2
    widths: tuple[int, int] = (3, 5)
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    layout: str = "dense"


class Window(StagedWindow):
    """Random staged rows, random slots with padding among them, NaN caches."""

    def tail(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slots, self.accepted, self.metadata

    def commit(self, tokens_per_program: int | None = None) -> None:
        CommitPlan(self.kv_caches).commit_windows(
            StagedSources(list(self.staged_key), list(self.staged_value)),
            self.slots,
            self.accepted.int(),  # windows of one row
            self.metadata[:, 1],
            tokens_per_request=1,
            layer_metadata=self.metadata,
            tokens_per_program=tokens_per_program,
        )

    def commit_by_reference(self) -> None:
        commit_staged_kv_cache_reference(
            self.staged_key, self.staged_value, self.kv_caches, *self.tail()
        )


def make_window(shape: Shape, seed: int, device: torch.device | str) -> Window:
    """The same window for the same seed on any device."""
    rng = generator(seed)
    blocks = -(-shape.rows // shape.block_size) + 1
    staged = []
    for width in shape.widths:
        rows = torch.full((shape.layers, shape.rows + 2, shape.kv_heads, width), float("nan"))
        rows[:, : shape.rows] = torch.randn(rows[:, : shape.rows].shape, generator=rng)
        if shape.cache_dtype is torch.bfloat16:  # the interpreter cuts off where a GPU rounds
            rows = rows.bfloat16()
        staged.append(rows.to(device, shape.dtype))
    slots = torch.randperm(blocks * shape.block_size, generator=rng)[: shape.rows]
    slots[torch.rand(shape.rows, generator=rng) < 0.2] = -1
    accepted = torch.rand(shape.rows, generator=rng) < 0.6
    metadata = torch.zeros(shape.layers, 2, dtype=torch.int32)
    metadata[:, 0] = (slots >= 0).sum()
    cache_shape = (blocks, shape.kv_heads, shape.block_size, sum(shape.widths))
    with torch.device(device):
        memory, caches = nan_caches(
            shape.layers, cache_shape, shape.cache_dtype or shape.dtype, shape.layout
        )
    return Window(
        *staged, memory, caches, slots.to(device), accepted.to(device), metadata.to(device)
    )


def compare(shape, seed, device, change=lambda window: None, tokens_per_program=None) -> Window:
    """Commit the same window both ways, compare all memory, return the Triton one."""
    expected, actual = make_window(shape, seed, "cpu"), make_window(shape, seed, device)
    change(expected)
    change(actual)
    expected.commit_by_reference()
    actual.commit(tokens_per_program)
    assert_same(actual.memory.cpu(), expected.memory)
    assert_same(actual.metadata.cpu(), expected.metadata)
    return actual


@examples(15)
@given(
    seed=SEEDS,
    rows=st.integers(0, 9),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    widths=st.sampled_from([(64, 64), (96, 96), (3, 5), (24, 16), (192, 128)]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
            (torch.float32, torch.bfloat16),
        ]
    ),
    layout=st.sampled_from(CACHE_LAYOUTS),
    tokens_per_program=st.sampled_from([None, 1, 4]),
)
def test_any_window_is_committed_as_by_the_reference(
    triton_device,
    seed,
    rows,
    layers,
    kv_heads,
    widths,
    block_size,
    dtypes,
    layout,
    tokens_per_program,
):
    shape = Shape(rows, layers, kv_heads, widths, block_size, *dtypes, layout)
    window = compare(shape, seed, triton_device, tokens_per_program=tokens_per_program)
    assert not window.metadata[:, 1].any()


@pytest.mark.parametrize("layout", ["dense", "tokens_before_heads"])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (64, 16, torch.bfloat16),
        (96, 32, torch.float16),
        (128, 64, torch.bfloat16),
        (256, 128, torch.float32),
    ],
)
def test_the_shapes_of_real_models(triton_device, head_dim, block_size, dtype, layout):
    shape = Shape(7, 2, 8, (head_dim, head_dim), block_size, dtype, layout=layout)
    assert num_written(compare(shape, head_dim, triton_device).memory) > 0


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape(5, 2, 10, (256, 256)), id="a row wider than a program"),
        pytest.param(Shape(1100, 2, 1, (4, 4), 16), id="more rows than one pass checks"),
        pytest.param(
            Shape(70, 120, 1, (2, 2), 16),
            id="many layers, several rows a program",
            marks=pytest.mark.gpu,  # the interpreter would take seconds
        ),
    ],
)
def test_large_windows(triton_device, shape):
    assert num_written(compare(shape, 7, triton_device).memory) > 0

    def spoil(window):  # the last slot and the last layer: every program must know
        window.slots[-1] = 10**6
        window.metadata[-1, 0] -= 1

    assert num_written(compare(shape, 7, triton_device, spoil).memory) == 0


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    ("count", "flags"), [(0, 0), (1, 0), (2, 0), (4, 0), (3, 1), (3, 2), (3, 64), (0, 1)]
)
def test_one_bad_layer_stops_all_and_is_flagged(triton_device, layer, count, flags):
    def spoil(window):
        window.slots[:] = torch.tensor([0, 5, -1, 6])
        window.accepted[:] = True
        window.metadata[:, 0] = 3
        window.metadata[layer] = torch.tensor([count, flags])

    window = compare(Shape(rows=4), 1, triton_device, spoil)
    assert num_written(window.memory) == 0
    mismatch = ERROR_COUNT_MISMATCH if count != 3 else 0
    expected = [(flags | mismatch) if at == layer else 0 for at in range(3)]
    assert window.metadata[:, 1].tolist() == expected


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("slot", [12, 13, 10_000, 2**40])
def test_a_slot_past_the_cache_is_refused_even_where_it_is_rejected(triton_device, slot, accepted):
    def spoil(window):
        window.slots[:] = torch.tensor([3, slot, 1, 0, -1, 2])  # 3 blocks of 4: slots 0..11
        window.accepted[:] = True
        window.accepted[1] = accepted
        window.metadata[:, 0] = 5

    window = compare(Shape(rows=6), 1, triton_device, spoil)
    assert num_written(window.memory) == 0
    assert window.metadata[:, 1].tolist() == [ERROR_SLOT_RANGE] * 3


def test_a_smaller_later_cache_stops_all_layers(triton_device):
    shape = Shape(rows=8, block_size=4, layers=3)

    def shrink(window):
        window.kv_caches[2] = window.kv_caches[2][:2]
        window.slots[:] = torch.tensor([8, 0, 1, 2, 3, 4, 5, 6])
        window.metadata[:, 0] = 8

    window = compare(shape, 1, triton_device, shrink)
    assert num_written(window.memory) == 0
    assert window.metadata[:, 1].tolist() == [0, 0, ERROR_SLOT_RANGE]


def test_more_rows_than_the_staging_buffers_hold_are_refused(triton_device):
    def cut(window):
        window.slots[-1] = 0
        window.metadata[:, 0] = (window.slots >= 0).sum()
        window.staged_key, window.staged_value = (
            window.staged_key[:, :5],
            window.staged_value[:, :5],
        )

    window = compare(Shape(rows=6), 1, triton_device, cut)
    assert num_written(window.memory) == 0
    assert window.metadata[:, 1].tolist() == [ERROR_OVERFLOW] * 3


def test_strided_slots_masks_metadata_and_staging_rows_are_followed(triton_device):
    def spread(window):
        window.slots = torch.stack([window.slots, window.slots * 0 - 9], dim=1)[:, 0]
        window.accepted = torch.stack([window.accepted, ~window.accepted], dim=1)[:, 0]
        window.metadata = torch.cat([window.metadata.T, window.metadata.T + 5]).T[:, :2]
        window.staged_key = window.staged_key.transpose(1, 2).contiguous().transpose(1, 2)
        window.staged_value = window.staged_value.flip(3).contiguous()

    assert num_written(compare(Shape(), 3, triton_device, spread).memory) > 0


@pytest.mark.parametrize(
    ("shapes", "dtypes", "word"),
    [
        ([(2, 1, 4, 8), (2, 1, 8, 8)], [torch.float32] * 2, "must share"),
        ([(2, 1, 4, 8), (2, 2, 4, 8)], [torch.float32] * 2, "must share"),
        ([(2, 1, 4, 8), (2, 1, 4, 8)], [torch.float32, torch.float16], "must share"),
        ([(2, 1, 4, 8)], [torch.int32], "torch.int32"),
        ([], [], "must share"),
    ],
)
def test_caches_that_one_launch_cannot_serve_are_refused(triton_device, shapes, dtypes, word):
    caches = [
        torch.zeros(shape, dtype=dtype, device=triton_device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    with pytest.raises(ValueError, match=word):
        CommitPlan(caches)


@pytest.mark.gpu
def test_rounding_to_a_bfloat16_cache_is_torchs():
    window = make_window(Shape(widths=(64, 64), cache_dtype=torch.bfloat16), 1, "cuda")
    window.staged_key.normal_()
    window.accepted[:] = True
    window.commit()
    expected = [torch.full_like(cache, float("nan")) for cache in window.kv_caches]
    metadata = window.metadata.clone()
    commit_staged_kv_cache_reference(
        window.staged_key, window.staged_value, expected, window.slots, window.accepted, metadata
    )
    for actual, cache in zip(window.kv_caches, expected, strict=True):
        assert_same(actual, cache)
