"""Commit of whole windows, by reference and in Triton: against the definition, row by row."""

from itertools import product

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import CACHE_LAYOUTS, SEEDS, assert_same, num_written

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents
from window_cases import Windows, WindowShape, check_windows, make_windows

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.metadata import (
    ERROR_COUNT_MISMATCH,
    ERROR_OVERFLOW,
    ERROR_ROW_RANGE,
    ERROR_SLOT_RANGE,
)


def by_index(windows: Windows) -> None:
    """Say of every row whose it is, instead of how many rows each window has."""
    tokens = windows.options.pop("tokens_per_request")
    row = torch.arange(windows.slots.shape[-1], dtype=torch.int32, device=windows.slots.device)
    row_request = row // tokens
    row_request[row_request >= windows.num_sampled.numel()] = -1
    windows.options |= {"row_request": row_request, "row_index": row % tokens}


def by_row(windows: Windows) -> None:
    """Sources in another order, a negative one among them."""
    rows = torch.arange(windows.slots.shape[-1], device=windows.slots.device).flip(0)
    rows[::4] = -1
    windows.options["rows"] = rows


def by_copy(windows: Windows) -> None:
    """Staged in buffers, whose counts are checked."""
    real = (windows.slots >= 0).sum(dim=-1)
    metadata = torch.zeros(len(windows.keys), 2, dtype=torch.int32, device=windows.slots.device)
    metadata[:, 0] = real if windows.slot_rows is None else real[windows.slot_rows]
    windows.options["layer_metadata"] = metadata


def with_certain_row(windows: Windows) -> None:
    """Counts of drafts alone."""
    windows.options["certain"] = 1


def without_certain_row(windows: Windows) -> None:
    """Drafts alone, and counts of the certain row too."""
    windows.options["certain"] = -1


CHANGES = {"equal": (), "indexed": (by_index,), "rows": (by_row,), "copied": (by_copy,)}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@examples(20)
@given(
    seed=SEEDS,
    requests=st.integers(0, 4),
    tokens=st.integers(1, 4),
    padding=st.integers(0, 5),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    widths=st.sampled_from([(64, 64), (3, 5), (24, 16), (192, 128)]),
    block_size=st.sampled_from([1, 3, 16]),
    dtypes=st.sampled_from([(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, F16)]),
    layout=st.sampled_from(CACHE_LAYOUTS),
    how=st.sampled_from(sorted(CHANGES)),
    certain=st.sampled_from([(), (with_certain_row,), (without_certain_row,)]),
    groups=st.sampled_from([0, 0, 1, 3]),
)
def test_any_windows(
    on_triton, seed, requests, tokens, padding, layers, kv_heads, widths, block_size, dtypes,
    layout, how, certain, groups,
):  # fmt: skip
    shape = WindowShape(
        requests, tokens, padding, layers, kv_heads, widths, block_size, *dtypes, layout,
        groups=groups,
    )  # fmt: skip

    def change(windows):
        windows.errors.fill_(64)  # an older flag stops nothing, and stays
        for step in (*CHANGES[how], *certain):
            step(windows)

    windows = check_windows(shape, seed, on_triton, change)
    assert (windows.errors == 64).all()


def test_rows_are_counted_once_by_programs_that_share_their_columns_and_add_up(triton_device):
    """One row of four programs, 16 heads of 256; the second commit adds to the first."""
    shape = WindowShape(requests=2, tokens=3, padding=2, kv_heads=16, widths=(256, 256))
    windows = make_windows(shape, 4, triton_device)
    windows.slots[:6] = torch.arange(6)
    windows.num_sampled[:] = torch.tensor([1, 3])
    for count in (4, 8):
        windows.launch()
        assert windows.written.tolist() == [count] * 2


@pytest.mark.parametrize("certain", [0, 1])
def test_a_request_without_a_count_commits_nothing(on_triton, certain):
    def cut(windows):  # what stands behind the counts would accept every row
        windows.num_sampled[:] = 99
        windows.num_sampled = windows.num_sampled[:2]
        windows.options["certain"] = certain

    shape = WindowShape(requests=3, padding=0, layout="tokens_before_heads")
    windows = check_windows(shape, 5, on_triton, cut)
    real = int((windows.slots[:6] >= 0).sum())
    assert num_written(windows.memory) == real * 2 * 2 * 8


def bad_slot(slot, sampled=3, how="equal"):
    def spoil(windows):
        for step in CHANGES[how]:
            step(windows)
        windows.num_sampled[:] = sampled
        windows.slots[4] = slot

    return spoil


def bad_row(sampled, slot=None):
    def spoil(windows):
        bad_slot(windows.slots[4] if slot is None else slot, sampled, "rows")(windows)
        windows.slots[2] = 1
        windows.options["rows"][2] = len(windows.keys[0])  # the first past the end

    return spoil


def fewer_sources(windows):
    windows.num_sampled[:] = 3
    windows.slots[:] = torch.tensor([*[-1] * 5, 8, *[-1] * 5])
    windows.keys = [key[:5] for key in windows.keys]
    windows.values = [value[:5] for value in windows.values]


def other_padding_than_was_staged(windows):
    windows.slot_rows = [0, 1]
    windows.slots[:] = torch.arange(11)
    by_copy(windows)
    windows.slots[1, 4] = -1


def staged(layer, count, flag):
    def spoil(windows):
        by_copy(windows)
        windows.num_sampled[:] = 3
        windows.options["layer_metadata"][layer, 0] += count
        windows.options["layer_metadata"][layer, 1] = flag

    return spoil


def smaller_later_cache(windows):
    windows.num_sampled[:] = 3
    windows.slots[0] = 15
    windows.kv_caches[1] = windows.kv_caches[1][:3]


BAD_SLOT = [ERROR_SLOT_RANGE] * 2  # 11 rows: 4 blocks of 4, slots 0..15
FAULTS = {
    **{f"slot 16, {how}": (bad_slot(16, how=how), BAD_SLOT) for how in CHANGES},
    "slot 2**40": (bad_slot(2**40), BAD_SLOT),
    "slot 16, rejected": (bad_slot(16, 0), BAD_SLOT),
    "row": (bad_row(3), [ERROR_ROW_RANGE] * 2),
    "row, rejected": (bad_row(0), [ERROR_ROW_RANGE] * 2),
    "row and slot": (bad_row(3, 16), [ERROR_ROW_RANGE | ERROR_SLOT_RANGE] * 2),
    "fewer sources": (fewer_sources, [ERROR_OVERFLOW] * 2),
    "a group's padding": (other_padding_than_was_staged, [0, ERROR_COUNT_MISMATCH]),
    "fewer staged": (staged(0, -1, 0), [ERROR_COUNT_MISMATCH, 0]),
    "more staged": (staged(1, 1, 0), [0, ERROR_COUNT_MISMATCH]),
    "flag": (staged(1, 0, 64), [0, 64]),
    "flag and count": (staged(0, -1, 2), [2 | ERROR_COUNT_MISMATCH, 0]),
    "smaller later cache": (smaller_later_cache, [0, ERROR_SLOT_RANGE]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_layer_stops_all_and_adds_its_flag(on_triton, fault):
    spoil, errors = FAULTS[fault]

    def change(windows):
        spoil(windows)
        windows.errors[1] = 128

    groups = 2 if "group" in fault else 0
    windows = check_windows(WindowShape(groups=groups), 2, on_triton, change)
    assert num_written(windows.memory) == 0
    assert windows.errors.tolist() == [errors[0], errors[1] | 128]
    assert not windows.written.any()


def test_padding_past_the_sources_is_no_fault(on_triton):
    def pad(windows):
        fewer_sources(windows)
        windows.slots[:] = torch.tensor([0, 1, 2, 3, 4, *[-1] * 6])

    windows = check_windows(WindowShape(), 2, on_triton, pad)
    assert num_written(windows.memory) == 5 * 2 * 2 * 8


def test_strided_inputs_are_followed(on_triton):
    def apart(tensor, other):
        return torch.stack([tensor, torch.full_like(tensor, other)], dim=1)[:, 0]

    def spread(windows):
        by_index(windows)
        by_row(windows)
        for name in ("row_request", "row_index", "rows"):
            windows.options[name] = apart(windows.options[name], 0)
        windows.slots = apart(windows.slots, 0)
        windows.num_sampled = apart(windows.num_sampled, 99)
        windows.errors = apart(windows.errors, 64)
        windows.keys = [key.flip(2) for key in windows.keys]

    assert num_written(check_windows(WindowShape(), 3, on_triton, spread).memory) > 0


def test_refilled_sources_take_other_tensors_rows_and_strides(triton_device):
    first, second = (make_windows(WindowShape(), seed, triton_device) for seed in (1, 2))
    sources = StagedSources(first.keys, first.values)
    table = sources.table.data_ptr()
    keys = [torch.cat([key, key.new_full((3, 2, 3), 7.0)]) for key in second.keys]
    sources.refill(keys, second.values)
    assert sources.table.data_ptr() == table
    CommitPlan(second.kv_caches).commit_windows(
        sources, CommitRows(second.slots, 3), second.num_sampled, second.errors
    )
    expected = make_windows(WindowShape(), 2, "cpu")
    expected.commit_by_definition()
    assert_same(second.memory.cpu(), expected.memory)


def test_one_plan_serves_every_kind_of_window(triton_device):
    """A launch is kept for its like: nothing that matters may be missing from what tells them."""
    shape = WindowShape(requests=2, padding=7, dtype=torch.bfloat16)
    actual = make_windows(shape, 1, triton_device)
    plan = CommitPlan(actual.kv_caches)
    kinds = [
        *CHANGES.values(),
        (with_certain_row,),
        (without_certain_row,),
        (by_index, by_row),
        (by_index, with_certain_row),
    ]
    for seed, (fewer, contiguous, kind) in enumerate(product((False, True), (False, True), kinds)):
        windows, expected = (make_windows(shape, seed, on) for on in (triton_device, "cpu"))
        for each in (windows, expected):
            for step in kind:
                step(each)
            if fewer:
                each.slots = each.slots[:9]
                for name in {"rows", "row_request", "row_index"} & set(each.options):
                    each.options[name] = each.options[name][-9:]
            if contiguous:
                each.keys = [key.contiguous() for key in each.keys]
                each.values = [value.contiguous() for value in each.values]
        actual.memory.fill_(torch.nan)
        windows.launch_by(plan, windows.num_sampled, actual.errors)
        expected.commit_by_definition()
        assert_same(actual.memory.cpu(), expected.memory)
        assert not actual.errors.any()


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (WindowShape(260, 5, 36, 2, 1, (4, 4), 16), "copied"),  # two passes to check the rows
        (WindowShape(2, 3, 0, 2, 10, (256, 256)), "equal"),  # a row wider than a program
        *(
            pytest.param(shape, how, marks=pytest.mark.gpu)  # the interpreter would take seconds
            for how in sorted(CHANGES)
            for shape in (
                WindowShape(260, 5, 36, 3, 1, (4, 4), 16),
                WindowShape(5, 3, 0, 2, 10, (256, 256)),
                WindowShape(20, 4, 8, 120, 1, (2, 2), 16),  # many layers
                WindowShape(64, 5, 36, 12, 2, (64, 64), 16, groups=7),  # many groups
            )
        ),
    ],
)
def test_large_windows(triton_device, shape, how):
    def change(windows):
        for step in CHANGES[how]:
            step(windows)

    def spoil(windows):  # the last real row: every program must know
        change(windows)
        windows.slots[..., shape.requests * shape.tokens - 1] = 10**6

    assert num_written(check_windows(shape, 7, triton_device, change).memory) > 0
    assert num_written(check_windows(shape, 7, triton_device, spoil).memory) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "cached"), [(BF16, BF16), (F16, F16), (F32, F32), (F32, BF16)])
@pytest.mark.parametrize("layout", ["dense", "tokens_before_heads"])
def test_the_shapes_of_real_models(triton_device, head_dim, dtype, cached, layout):
    """Every block size and number of heads with every head dim, in turn."""
    for block_size, kv_heads in ((16, 1), (32, 8), (64, 3), (128, 4)):
        widths = (head_dim, head_dim)
        shape = WindowShape(9, 5, 3, 3, kv_heads, widths, block_size, dtype, cached, layout)
        assert num_written(check_windows(shape, head_dim, triton_device).memory) > 0


@pytest.mark.gpu
def test_a_captured_commit_follows_new_counts_slots_and_sources():
    shape = WindowShape(4, 5, 12, 3, 8, (128, 128), 16, torch.bfloat16)
    first, second = (make_windows(shape, seed, "cuda") for seed in (1, 2))
    sources, plan = StagedSources(first.keys, first.values), CommitPlan(first.kv_caches)
    num_sampled, slots = torch.zeros_like(first.num_sampled), torch.full_like(first.slots, -1)

    def commit() -> None:
        plan.commit_windows(sources, CommitRows(slots, 5), num_sampled, first.errors)

    commit()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        commit()
    assert num_written(first.memory) == 0
    expected = make_windows(shape, 1, "cpu")
    for seed, windows in ((1, first), (2, second)):  # the second writes over the first
        num_sampled.copy_(windows.num_sampled)
        slots.copy_(windows.slots)
        sources.refill(windows.keys, windows.values)
        graph.replay()
        step = make_windows(shape, seed, "cpu")
        step.kv_caches = expected.kv_caches
        step.commit_by_definition()
        assert_same(first.memory.cpu(), expected.memory)
    slots[3] = 10**6
    before = first.memory.clone()
    num_sampled.fill_(5)
    graph.replay()
    assert_same(first.memory, before)
    assert first.errors.tolist() == [ERROR_SLOT_RANGE] * 3


@triton.jit
def _write_late(counts, value, rounds: tl.constexpr):
    gdc_launch_dependents()  # the next kernel may start now
    zero = 0
    for _ in range(rounds):
        zero += tl.load(counts, volatile=True)
    tl.store(counts, zero + value)


@pytest.mark.gpu
def test_a_commit_waits_for_the_kernel_before_it():
    """A commit may start before that kernel has finished, and must not read before it has."""
    windows = make_windows(WindowShape(1, 5, 0, 2, 8, (128, 128), 16, torch.bfloat16), 1, "cuda")
    windows.slots[:] = torch.arange(5)
    plan, sources = CommitPlan(windows.kv_caches), StagedSources(windows.keys, windows.values)
    for _ in range(3):  # the first time compiles both kernels
        windows.memory.fill_(torch.nan)
        windows.num_sampled.zero_()
        _write_late[(1,)](windows.num_sampled, 5, rounds=2000)
        plan.commit_windows(
            sources, CommitRows(windows.slots, 5), windows.num_sampled, windows.errors
        )
        assert num_written(windows.memory) == 2 * 5 * 8 * 256
