"""Commit: accepted rows reach every layer's cache, or no layer is touched."""

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

from nwor_kernels.commit.reference import commit_staged_kv_cache_reference
from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
)


class Window(StagedWindow):
    """A staged window: row i belongs to slot slots[i]; NaN staging rows past the window."""

    def commit(self) -> None:
        commit_staged_kv_cache_reference(
            self.staged_key,
            self.staged_value,
            self.kv_caches,
            self.slots,
            self.accepted,
            self.metadata,
        )

    @property
    def flags(self) -> list[int]:
        return self.metadata[:, 1].tolist()


def make_window(
    *,
    slots: list[int],
    accepted: list[bool],
    layers: int = 3,
    shape: tuple[int, int, int] = (4, 2, 4),
    widths: tuple[int, int] = (3, 3),
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "dense",
    seed: int = 0,
) -> Window:
    blocks, kv_heads, block_size = shape
    rng, window = generator(seed), len(slots)
    staged = []
    for width in widths:
        rows = torch.full((layers, window + 2, kv_heads, width), float("nan"), dtype=dtype)
        rows[:, :window] = torch.randn(layers, window, kv_heads, width, generator=rng).to(dtype)
        staged.append(rows)
    padding = torch.tensor(slots).long() < 0
    for rows in staged:  # a padded row holds anything at all; NaN would not show in NaN caches
        rows[:, :window][:, padding] = 99.0
    cache_shape = (blocks, kv_heads, block_size, sum(widths))
    memory, kv_caches = nan_caches(layers, cache_shape, cache_dtype or dtype, layout)
    metadata = torch.zeros(layers, 2, dtype=torch.int32)
    metadata[:, 0] = sum(slot >= 0 for slot in slots)
    return Window(
        *staged,
        memory,
        kv_caches,
        torch.tensor(slots).long(),
        torch.tensor(accepted, dtype=torch.bool),
        metadata,
    )


def expected_caches(window: Window) -> list[Tensor]:
    """Element by element, from the definition of a slot."""
    caches = [torch.full(cache.shape, float("nan")).to(cache) for cache in window.kv_caches]
    block_size = caches[0].shape[2]
    head_dim = window.staged_key.shape[-1]
    for layer, cache in enumerate(caches):
        for i, (slot, accepted) in enumerate(zip(window.slots, window.accepted, strict=True)):
            if not accepted or slot < 0:
                continue
            block, offset = divmod(int(slot), block_size)
            for head in range(cache.shape[1]):
                for d in range(cache.shape[3]):
                    cache[block, head, offset, d] = (
                        window.staged_key[layer, i, head, d]
                        if d < head_dim
                        else window.staged_value[layer, i, head, d - head_dim]
                    )
    return caches


@examples(60)
@given(
    seed=SEEDS,
    layers=st.integers(1, 3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)),
    widths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(CACHE_LAYOUTS),
    data=st.data(),
)
def test_accepted_rows_are_written_and_nothing_else(
    seed, layers, shape, widths, cache_dtype, layout, data
):
    every_slot = data.draw(st.permutations(range(shape[0] * shape[2])))
    slots = every_slot[: data.draw(st.integers(0, len(every_slot)))]
    for at in data.draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(at, data.draw(st.integers(-3, -1)))
    accepted = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    window = make_window(
        slots=slots,
        accepted=accepted,
        layers=layers,
        shape=shape,
        widths=widths,
        cache_dtype=cache_dtype,
        layout=layout,
        seed=seed,
    )
    window.commit()

    for cache, expected in zip(window.kv_caches, expected_caches(window), strict=True):
        assert_same(cache, expected)
    kept = sum(a and s >= 0 for a, s in zip(accepted, slots, strict=True))
    assert num_written(window.memory) == layers * kept * shape[1] * sum(widths)
    assert window.flags == [0] * layers


def test_strided_slots_masks_and_staging_rows_are_followed():
    window = make_window(slots=[6, 1, 11], accepted=[True, False, True])
    dense = expected_caches(window)
    window.slots = torch.stack([window.slots, torch.full((3,), -9)], dim=1)[:, 0]
    window.accepted = torch.stack([window.accepted, ~window.accepted], dim=1)[:, 0]
    window.staged_key = window.staged_key.transpose(1, 2).contiguous().transpose(1, 2)
    window.commit()
    for cache, expected in zip(window.kv_caches, dense, strict=True):
        assert_same(cache, expected)


def test_each_layer_writes_to_the_slots_of_its_group():
    """Three layers in two groups equal three commits of one layer each; one bad slot stops all."""
    slots = torch.tensor([[0, 5, 7], [11, 2, 3]])
    rows = [1, 0, 1]
    window = make_window(slots=[0, 5, 7], accepted=[True, False, True])
    expected = []
    for layer, row in enumerate(rows):
        window.slots = slots[row]
        expected.append(expected_caches(window)[layer])

    def commit(to):
        staged = (window.staged_key, window.staged_value, window.kv_caches)
        commit_staged_kv_cache_reference(*staged, to, window.accepted, window.metadata, rows)

    bad = slots.clone()
    bad[0, 1] = 16
    commit(bad)
    assert num_written(window.memory) == 0
    assert window.flags == [0, ERROR_SLOT_RANGE, 0]
    window.metadata[:, 1] = 0
    commit(slots)
    for cache, wanted in zip(window.kv_caches, expected, strict=True):
        assert_same(cache, wanted)
    assert window.flags == [0] * 3


def test_a_rejected_window_writes_nothing_and_is_no_error():
    window = make_window(slots=[0, 5], accepted=[False, False])
    window.commit()
    assert num_written(window.memory) == 0
    assert window.flags == [0, 0, 0]


@pytest.mark.parametrize("bad_layer", [0, 1, 2])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_layer_that_staged_another_number_stops_all_layers(bad_layer, count):
    window = make_window(slots=[0, 5], accepted=[True, True])
    window.metadata[bad_layer, 0] = count
    window.commit()
    assert num_written(window.memory) == 0
    assert window.flags == [ERROR_COUNT_MISMATCH * (layer == bad_layer) for layer in range(3)]


@pytest.mark.parametrize("bad_layer", [0, 1, 2])
@pytest.mark.parametrize("flag", [ERROR_OVERFLOW, ERROR_ROW_RANGE])
def test_a_layer_with_an_error_from_staging_stops_all_layers_and_keeps_its_flag(bad_layer, flag):
    window = make_window(slots=[0, 5], accepted=[True, True])
    window.metadata[bad_layer, 1] = flag
    window.commit()
    assert num_written(window.memory) == 0
    assert window.flags == [flag * (layer == bad_layer) for layer in range(3)]


def test_flags_add_up():
    window = make_window(slots=[0, 5], accepted=[True, True])
    window.metadata[1] = torch.tensor([0, ERROR_OVERFLOW])
    window.commit()
    assert window.flags == [0, ERROR_OVERFLOW | ERROR_COUNT_MISMATCH, 0]


@pytest.mark.parametrize("accepted", [[True, True], [True, False]])
@pytest.mark.parametrize("slot", [16, 17, 10_000])
def test_a_slot_past_the_cache_is_refused_even_where_it_is_rejected(slot, accepted):
    window = make_window(slots=[3, slot], accepted=accepted)  # 4 blocks of 4: slots 0..15
    window.commit()
    assert num_written(window.memory) == 0
    assert window.flags == [ERROR_SLOT_RANGE] * 3


def test_the_last_slot_of_the_cache_is_a_slot():
    window = make_window(slots=[15], accepted=[True])
    window.commit()
    assert window.flags == [0, 0, 0]
    assert_same(window.kv_caches[2][3, :, 3, :3], window.staged_key[2, 0])


def test_the_staged_counts_are_left_as_they_are():
    window = make_window(slots=[2, -1, 4], accepted=[True, True, False])
    window.commit()
    assert window.metadata.tolist() == [[2, 0]] * 3


def test_a_smaller_later_cache_stops_all_layers() -> None:
    key = torch.randn(2, 4, 1, 8)
    caches = [torch.full((2, 1, 4, 16), torch.nan), torch.full((1, 1, 4, 16), torch.nan)]
    metadata = torch.tensor([[1, 0], [1, 0]], dtype=torch.int32)
    slots, accepted = torch.tensor([5]), torch.tensor([True])
    commit_staged_kv_cache_reference(key, key, caches, slots, accepted, metadata)
    assert metadata[:, 1].tolist() == [0, 8]
    assert all(cache.isnan().all() for cache in caches)
