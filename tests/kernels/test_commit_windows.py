"""The reference of committing whole windows: against a loop over the definition of a slot."""

import math

import pytest
import torch
from accepted_rows import accepted_rows
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import (
    CACHE_LAYOUTS,
    SEEDS,
    assert_same,
    generator,
    kv_of_layers,
    nan_caches,
    num_written,
)

from nwor_kernels.commit.reference import LayerCaches, commit_windows_reference
from nwor_kernels.fp8 import quantize_e4m3
from nwor_kernels.metadata import (
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
)

BLOCKS, HEADS, BLOCK_SIZE, WIDTHS = 3, 2, 4, (3, 2)


def committed(
    slots,
    accepted,
    rows=None,
    *,
    num_rows=6,
    layers=2,
    seed=0,
    layout="tokens_before_heads",
    cache_dtype=torch.float32,
    metadata=None,
    **options,
):
    """(keys, values, memory, caches, errors) after a commit; errors held another flag before."""
    keys, values = kv_of_layers(layers, num_rows, HEADS, WIDTHS, torch.float32, generator(seed))
    shape = (BLOCKS, HEADS, BLOCK_SIZE, sum(WIDTHS))
    memory, caches = nan_caches(layers, shape, cache_dtype, layout)
    errors = torch.full((layers,), 64, dtype=torch.int32)
    commit_windows_reference(
        (keys, values),
        LayerCaches(caches, **options),
        torch.tensor(slots).long(),
        torch.tensor(accepted, dtype=torch.bool),
        errors,
        rows=None if rows is None else torch.tensor(rows).long(),
        layer_metadata=None if metadata is None else torch.tensor(metadata, dtype=torch.int32),
    )
    return keys, values, memory, caches, errors.tolist()


@examples(60)
@given(
    seed=SEEDS,
    by_row=st.booleans(),
    layout=st.sampled_from(CACHE_LAYOUTS),
    cache_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_accepted_rows_are_written_and_nothing_else(seed, by_row, layout, cache_dtype, data):
    places = data.draw(st.permutations(range(BLOCKS * BLOCK_SIZE)))
    slots = places[: data.draw(st.integers(0, 6))]
    for at in data.draw(st.lists(st.integers(0, len(slots)), max_size=3)):
        slots.insert(at, data.draw(st.integers(-3, -1)))
    slots = slots[:6]
    accepted = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    rows = None
    if by_row:
        rows = data.draw(st.lists(st.integers(-2, 5), min_size=len(slots), max_size=len(slots)))
    counted = {"metadata": [[sum(slot >= 0 for slot in slots), 0]] * 2}
    keys, values, memory, caches, errors = committed(
        slots, accepted, rows, seed=seed, layout=layout, cache_dtype=cache_dtype, **counted
    )

    written = 0
    for i, (slot, kept) in enumerate(zip(slots, accepted, strict=True)):
        source = i if rows is None else rows[i]
        if not kept or slot < 0 or source < 0:
            continue
        written += 1
        block, offset = divmod(slot, BLOCK_SIZE)
        for layer, cache in enumerate(caches):
            for head in range(HEADS):
                both = torch.cat([keys[layer][source, head], values[layer][source, head]])
                assert_same(cache[block, head, offset], both.to(cache_dtype))
    assert num_written(memory) == written * len(caches) * HEADS * sum(WIDTHS)
    assert errors == [64, 64]  # an older flag stops nothing, and stays


@pytest.mark.parametrize(
    ("slots", "rows", "flag"),
    [
        ([0, 12], None, ERROR_SLOT_RANGE),
        ([0, 1, 2, 3, 4, 5, 6], None, ERROR_OVERFLOW),
        ([-1, -1, -1, -1, -1, -1, 6], None, ERROR_OVERFLOW),
        ([0, 1], [0, 6], ERROR_ROW_RANGE),
        ([12, 1], [0, 6], ERROR_ROW_RANGE | ERROR_SLOT_RANGE),
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_what_is_out_of_range_stops_all_layers_even_if_rejected(slots, rows, flag, kept):
    _, _, memory, _, errors = committed(slots, [True] * (len(slots) - 1) + [kept], rows)
    assert num_written(memory) == 0
    assert errors == [flag | 64] * 2


def test_each_layer_writes_to_the_slots_of_its_group_and_one_bad_slot_stops_all():
    slots, rows = [[0, 5, 7], [11, 2, 3]], [1, 0, 1]
    options = {"layers": 3, "slot_rows": rows, "seed": 3}
    _, _, _, caches, errors = committed(slots, [True, False, True], **options)
    for layer, row in enumerate(rows):
        _, _, _, alone, _ = committed(slots[row], [True, False, True], layers=3, seed=3)
        assert_same(caches[layer], alone[layer])
    assert errors == [64] * 3
    bad = [[0, 12, 7], slots[1]]
    _, _, memory, _, errors = committed(bad, [True, False, True], **options)
    assert num_written(memory) == 0
    assert errors == [64, 64 | ERROR_SLOT_RANGE, 64]


@pytest.mark.parametrize(
    ("slots", "rows"), [([0, 1, 2, 3, 4, 5, -1, -1], None), ([0, -1], [5, 99]), ([0, 3], [5, -9])]
)
def test_padding_past_the_sources_is_no_error(slots, rows):
    _, _, memory, _, errors = committed(slots, [True] * len(slots), rows)
    assert num_written(memory) > 0
    assert errors == [64, 64]


@examples(60)
@given(
    counts=st.lists(st.integers(0, 5), max_size=4),
    tokens=st.integers(1, 4),
    certain=st.integers(-1, 1),
    num_rows=st.integers(0, 20),
)
def test_equal_windows_are_rows_of_a_request_and_a_place(counts, tokens, certain, num_rows):
    expected = []
    for row in range(num_rows):
        request, index = row // tokens, row % tokens
        expected.append(request < len(counts) and index < counts[request] + certain)
    num_sampled = torch.tensor(counts, dtype=torch.int32)
    by_size = accepted_rows(num_sampled, num_rows, certain=certain, tokens_per_request=tokens)
    assert by_size.tolist() == expected
    row = torch.arange(num_rows, dtype=torch.int32)
    by_index = accepted_rows(
        num_sampled, num_rows, certain=certain, row_request=row // tokens, row_index=row % tokens
    )
    assert by_index.tolist() == expected


def test_a_negative_request_is_padding():
    row_request = torch.tensor([-1, 0, -5, 1], dtype=torch.int32)
    kept = accepted_rows(
        torch.tensor([3, 3]), 4, row_request=row_request, row_index=torch.zeros(4, dtype=torch.int)
    )
    assert kept.tolist() == [False, True, False, True]


def e4m3_numbers() -> list[tuple[float, int]]:
    """(value, byte) of every finite e4m3fn number that is not negative, from its bits."""
    numbers = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        if exponent:
            numbers.append((math.ldexp(8 + mantissa, exponent - 10), byte))
        else:
            numbers.append((math.ldexp(mantissa, -9), byte))
    return numbers


@examples(30)
@given(
    seed=SEEDS,
    scale=st.sampled_from([1.0, 0.37, 3.0, 0.0078]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_quantisation_rounds_to_the_nearest_even_number_and_saturates(seed, scale, dtype):
    """Against the nearest of all e4m3 numbers, by distances of float32 quotients in float64."""
    size = torch.tensor([0.004, 0.1, 5.0, 400.0]) * scale
    rows = (torch.randn(5, 2, 4, generator=generator(seed)) * size).to(dtype)
    got = quantize_e4m3(rows, torch.tensor([scale])).view(torch.uint8)
    numbers = e4m3_numbers()
    for value, byte in zip(rows.flatten(), got.flatten().tolist(), strict=True):
        quotient = float(value.float() / torch.tensor(scale))
        nearest = min(numbers, key=lambda n: (abs(n[0] - abs(quotient)), n[1] % 2))[1]
        assert byte == nearest | (0x80 if math.copysign(1.0, quotient) < 0 else 0)


def test_quantisation_divides_where_a_reciprocal_would_miss_a_tie():
    halfway = torch.tensor([1.0625, 1.1875, 1.3125, 1.4375, 1.5625, 1.6875, 1.8125])
    rows = (halfway * 3)[:, None, None]
    got = quantize_e4m3(rows, torch.tensor([3.0])).float().flatten()
    assert got.tolist() == [1.0, 1.25, 1.25, 1.5, 1.5, 1.75, 1.75]


def test_each_head_has_its_scale_and_nan_stays_nan():
    rows = torch.full((1, 3, 2), 8.0)
    rows[0, 2, 0], rows[0, 2, 1] = math.nan, math.inf
    got = quantize_e4m3(rows, torch.tensor([1.0, 2.0, 4.0]))
    assert got[0, :2].float().tolist() == [[8.0, 8.0], [4.0, 4.0]]
    assert got[0, 2].float().isnan().tolist() == [True, False]
    assert float(got[0, 2, 1].float()) == 448.0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_an_fp8_cache_is_written_quantised_by_the_scales_of_its_layer(dtype, heads):
    keys, values = kv_of_layers(2, 3, HEADS, WIDTHS, torch.bfloat16, generator(5))
    shape = (BLOCKS, HEADS, BLOCK_SIZE, sum(WIDTHS))
    memory, caches = nan_caches(2, shape, torch.uint8, "dense")
    k_scales, v_scales = (
        [torch.rand(heads, generator=generator(n)) + 0.1 for n in range(two, two + 2)]
        for two in (7, 9)
    )
    commit_windows_reference(
        (keys, values),
        LayerCaches([cache.view(dtype) for cache in caches], k_scales, v_scales),
        torch.tensor([9, -1, 2]),
        torch.tensor([True, True, True]),
        torch.zeros(2, dtype=torch.int32),
    )
    for layer, cache in enumerate(caches):
        for row, (block, offset) in ((0, (2, 1)), (2, (0, 2))):
            for head in range(HEADS):
                k_scale, v_scale = (scales[layer][head % heads] for scales in (k_scales, v_scales))
                expected = torch.cat(
                    [keys[layer][row, head].float() / k_scale,
                     values[layer][row, head].float() / v_scale]
                ).to(torch.float8_e4m3fn)  # fmt: skip
                assert_same(cache[block, head, offset], expected.view(torch.uint8))
    assert num_written(memory) == 2 * 2 * HEADS * sum(WIDTHS)
