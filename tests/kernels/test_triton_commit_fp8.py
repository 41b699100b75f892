"""Commit to fp8 caches in Triton: interpreted where that is exact, rounded on a GPU."""

import pytest
import torch
from kernel_inputs import assert_same, num_written

pytest.importorskip("triton")

from window_cases import E4M3_DTYPES, Windows, WindowShape, compare_windows, make_windows

from nwor_kernels.commit.plan import CommitPlan

EVERY_FINITE = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F]).to(torch.uint8)


def make_exact(windows: Windows) -> None:
    """Rows that a scale turns into e4m3 numbers, so that an interpreter need not round.

    A scale of a power of two for each layer and head, K's and V's differing; every tenth
    element is past the largest number.
    """
    numbers = EVERY_FINITE.view(torch.float8_e4m3fn).float()
    for n, (rows, scales) in enumerate(
        ((windows.keys, windows.k_scales), (windows.values, windows.v_scales))
    ):
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
def test_exact_numbers_and_saturation(triton_device, cache_dtype, scales, layout):
    shape = WindowShape(
        requests=4,
        widths=(24, 16),
        dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
        layout=layout,
        scales=scales,
    )
    assert num_written(compare_windows(shape, 1, triton_device, make_exact).memory) > 0


def test_fp8_caches_need_scales_that_fit(triton_device):
    cache = torch.zeros(2, 3, 4, 8, dtype=torch.uint8, device=triton_device)
    one, three = (torch.ones(n, device=triton_device) for n in (1, 3))
    for k_scales, v_scales in (
        (None, [one]),
        ([one], None),
        ([one, one], [one]),
        ([torch.ones(2, device=triton_device)], [one]),
        ([one.double()], [one]),
        ([torch.ones(6, device=triton_device)[::2]], [one]),
    ):
        with pytest.raises(ValueError, match=r"[kv]_scales"):
            CommitPlan([cache], k_scales, v_scales)
    with pytest.raises(ValueError, match="v_scales"):
        CommitPlan([cache, cache], [one, one], [one, three])
    with pytest.raises(ValueError, match="k_scales"):
        CommitPlan([cache.float()], [one], [one])


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

    def widen(windows):  # subnormal numbers, saturation, infinity
        for rows in (*windows.keys, *windows.values):
            size = 2.0 ** (torch.arange(rows[0].numel()) % 22 - 14)
            rows *= size.view(rows.shape[1:]).to(rows)
            rows[1] = torch.inf

    assert num_written(compare_windows(shape, head_dim, triton_device, widen).memory) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [3.0, 0.37, 1 / 7])
def test_ties_are_met_by_division_and_go_to_the_even_number(scale):
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

    assert num_written(compare_windows(shape, 1, "cuda", ties).memory) == 640


@pytest.mark.gpu
def test_nan_is_written_as_nan_and_scales_are_read_anew():
    shape = WindowShape(2, 2, 0, 1, 2, (64, 64), 16, torch.bfloat16, torch.uint8, scales=1)
    windows = make_windows(shape, 1, "cuda")
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
def test_bit_for_bit_what_vllm_writes(vllm_cache_write, dtype, per_head):
    scales = 8 if per_head else 1
    shape = WindowShape(64, 5, 0, 1, 8, (128, 128), 16, dtype, torch.uint8, scales=scales)
    windows = make_windows(shape, 11, "cuda")
    windows.num_sampled[:] = 5
    size = 2.0 ** (torch.arange(1024, device="cuda") % 22 - 14)
    for rows in (windows.keys[0], windows.values[0]):
        rows *= size.view(8, 128).to(dtype)
    windows.launch()
    stock = torch.full_like(windows.kv_caches[0], 0x7F)
    to_key, to_value = stock.transpose(1, 2).split(128, dim=-1)
    vllm_cache_write(
        windows.keys[0], windows.values[0], to_key, to_value, windows.slots, "fp8",
        windows.k_scales[0], windows.v_scales[0],
    )  # fmt: skip
    assert num_written(stock) == int((windows.slots >= 0).sum()) * 8 * 256
    assert_same(windows.kv_caches[0], stock)
