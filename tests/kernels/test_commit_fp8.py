"""Commit to fp8 caches: the rounding of torch, interpreted where that is exact, all on a GPU."""

import math

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, assert_same, generator, num_written

pytest.importorskip("triton")

from window_cases import E4M3_DTYPES, WindowShape, check_windows, make_windows

from nwor_kernels.fp8 import quantize_e4m3

EVERY_FINITE = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F]).to(torch.uint8)


def e4m3_numbers() -> list[tuple[float, int]]:
    """(value, byte) of every finite e4m3fn number that is not negative, from its bits."""
    numbers = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        number = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
        numbers.append((number, byte))
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


def make_exact(windows) -> None:
    """Rows that a scale turns into e4m3 numbers, so that an interpreter need not round.

    A scale of a power of two for each layer and head, K's and V's differing; every tenth
    element is past the largest number.
    """
    numbers = EVERY_FINITE.view(torch.float8_e4m3fn).float()
    both = ((windows.keys, windows.k_scales), (windows.values, windows.v_scales))
    for n, (rows, scales) in enumerate(both):
        for layer, scale in enumerate(scales):
            scale.copy_(2.0 ** (torch.arange(scale.numel()) + 2 * layer + n - 2))
            at = torch.arange(rows[layer].numel()) * (7 + layer + n)
            exact = numbers[at % len(numbers)].view(rows[layer].shape).clone()
            past = exact.view(-1)[::10]
            past.copy_(past.sign() * 1e6)
            rows[layer].copy_(exact.to(scale.device) * scale.reshape(1, -1, 1))


@pytest.mark.parametrize("cache_dtype", E4M3_DTYPES)
@pytest.mark.parametrize("scales", [1, 2])
@pytest.mark.parametrize("layout", ["dense", "cut_from_larger"])
def test_exact_numbers_and_saturation(on_triton, cache_dtype, scales, layout):
    shape = WindowShape(
        requests=4, widths=(24, 16), dtype=torch.bfloat16, cache_dtype=cache_dtype, layout=layout,
        scales=scales,
    )  # fmt: skip
    assert num_written(check_windows(shape, 1, on_triton, make_exact).memory) > 0


def widen(windows) -> None:
    """Subnormal numbers and saturation."""
    for rows in (*windows.keys, *windows.values):
        size = 2.0 ** (torch.arange(rows[0].numel()) % 22 - 14)
        rows *= size.view(rows.shape[1:]).to(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "kv_heads", "layout"),
    [
        (64, 16, 8, "dense"),
        (96, 32, 3, "tokens_before_heads"),
        (128, 64, 8, "tokens_before_heads"),
        (256, 128, 4, "dense"),
    ],
)
def test_rounding_is_torchs(triton_device, dtype, per_head, head_dim, block_size, kv_heads, layout):
    shape = WindowShape(
        13, 5, 7, 3, kv_heads, (head_dim, head_dim), block_size, dtype, torch.uint8, layout,
        kv_heads if per_head else 1,
    )  # fmt: skip

    def change(windows):
        widen(windows)
        for rows in (*windows.keys, *windows.values):
            rows[1] = torch.inf

    assert num_written(check_windows(shape, head_dim, triton_device, change).memory) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [3.0, 0.37, 1 / 7])
def test_ties_are_met_by_division_and_go_to_the_even_number(triton_device, scale):
    """Halfway between neighbours, times the scale: a reciprocal would miss some of the ties."""
    finite = EVERY_FINITE.view(torch.float8_e4m3fn).float().sort().values
    halfway = ((finite[1:] + finite[:-1]) / 2).repeat(3)[:640]
    shape = WindowShape(1, 1, 0, 1, 1, (320, 320), 16, torch.float32, torch.uint8, scales=1)

    def ties(windows):
        windows.num_sampled[:], windows.slots[:] = 1, 0
        for scales in (windows.k_scales, windows.v_scales):
            scales[0].fill_(scale)
        windows.keys[0].copy_((halfway[:320] * scale).view(1, 1, 320))
        windows.values[0].copy_((halfway[320:] * scale).view(1, 1, 320))

    assert num_written(check_windows(shape, 1, triton_device, ties).memory) == 640


@pytest.mark.gpu
def test_nan_is_written_as_nan_and_scales_are_read_anew(triton_device):
    shape = WindowShape(2, 2, 0, 1, 2, (64, 64), 16, torch.bfloat16, torch.uint8, scales=1)
    windows = make_windows(shape, 1, triton_device)
    windows.slots[:], windows.num_sampled[:] = torch.arange(4), 2
    windows.memory.zero_()
    windows.keys[0][:], windows.values[0][:] = torch.nan, 6.0
    windows.v_scales[0].fill_(2.0)
    windows.launch()
    cache = windows.kv_caches[0].view(torch.float8_e4m3fn).float()
    assert cache[0, :, :4, :64].isnan().all()
    assert (cache[0, :, :4, 64:] == 3.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bit_for_bit_what_vllm_writes(vllm_cache_write, triton_device, dtype, per_head):
    scales = 8 if per_head else 1
    shape = WindowShape(64, 5, 0, 1, 8, (128, 128), 16, dtype, torch.uint8, scales=scales)
    windows = make_windows(shape, 11, triton_device)
    windows.num_sampled[:] = 5
    widen(windows)
    windows.launch()
    stock = torch.full_like(windows.kv_caches[0], 0x7F)
    to_key, to_value = stock.transpose(1, 2).split(128, dim=-1)
    vllm_cache_write(
        windows.keys[0], windows.values[0], to_key, to_value, windows.slots, "fp8",
        windows.k_scales[0], windows.v_scales[0],
    )  # fmt: skip
    assert num_written(stock) == int((windows.slots >= 0).sum()) * 8 * 256
    assert_same(windows.kv_caches[0], stock)
