"""Commit of whole windows by reference in Triton: interpreted, or on a GPU."""

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
from window_cases import Windows, WindowShape, compare_windows, make_windows

from nwor_kernels.commit.plan import CommitPlan, CommitRows, StagedSources
from nwor_kernels.metadata import ERROR_COUNT_MISMATCH, ERROR_OVERFLOW, ERROR_SLOT_RANGE


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


@examples(15)
@given(
    seed=SEEDS,
    requests=st.integers(0, 4),
    tokens=st.integers(1, 4),
    padding=st.integers(0, 5),
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    widths=st.sampled_from([(64, 64), (3, 5), (24, 16), (192, 128)]),
    block_size=st.sampled_from([1, 3, 16]),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float16),
        ]
    ),
    layout=st.sampled_from(CACHE_LAYOUTS),
    how=st.sampled_from(sorted(CHANGES)),
    certain=st.sampled_from([(), (with_certain_row,), (without_certain_row,)]),
    groups=st.sampled_from([0, 0, 1, 3]),
)
def test_any_windows_are_committed_as_by_the_reference(
    triton_device,
    seed,
    requests,
    tokens,
    padding,
    layers,
    kv_heads,
    widths,
    block_size,
    dtypes,
    layout,
    how,
    certain,
    groups,
):
    shape = WindowShape(
        requests, tokens, padding, layers, kv_heads, widths, block_size, *dtypes, layout,
        groups=groups,
    )  # fmt: skip

    def change(windows):
        windows.errors.fill_(64)  # an older flag stops nothing, and stays
        for step in (*CHANGES[how], *certain):
            step(windows)

    windows = compare_windows(shape, seed, triton_device, change)
    assert (windows.errors == 64).all()


def test_rows_are_counted_once_by_programs_that_share_their_columns_and_add_up(triton_device):
    """One row of four programs, 16 heads of 256; the second commit adds to the first."""
    shape = WindowShape(requests=2, tokens=3, padding=2, kv_heads=16, widths=(256, 256))
    windows = make_windows(shape, 4, triton_device)
    windows.slots[:6] = torch.arange(6)
    windows.num_sampled[:] = torch.tensor([1, 3])
    windows.launch()
    assert windows.written.tolist() == [4, 4]
    windows.launch()
    assert windows.written.tolist() == [8, 8]


def test_a_request_without_a_count_commits_nothing(triton_device):
    def cut(windows):  # what stands behind the counts would accept every row
        windows.num_sampled[:] = 99
        windows.num_sampled = windows.num_sampled[:2]

    for certain in ((), (with_certain_row,)):
        windows = compare_windows(
            WindowShape(requests=3, padding=0, layout="tokens_before_heads"), 5, triton_device,
            lambda w, certain=certain: [step(w) for step in (cut, *certain)],
        )  # fmt: skip
        real = int((windows.slots[:6] >= 0).sum())
        assert num_written(windows.memory) == real * 2 * 2 * 8


@pytest.mark.parametrize("slot", [16, 17, 2**40])  # 12 rows: 4 blocks of 4, slots 0..15
@pytest.mark.parametrize("how", sorted(CHANGES))
def test_a_bad_slot_commits_nothing_and_adds_its_flag(triton_device, how, slot):
    def spoil(windows):
        for step in CHANGES[how]:
            step(windows)
        windows.num_sampled[:] = 3
        windows.slots[4] = slot
        windows.errors[:] = torch.tensor([0, 64])

    windows = compare_windows(WindowShape(padding=3), 2, triton_device, spoil)
    assert num_written(windows.memory) == 0
    assert windows.errors.tolist() == [ERROR_SLOT_RANGE, 64 | ERROR_SLOT_RANGE]
    assert windows.written.tolist() == [0, 0]


def test_a_group_with_other_padding_than_was_staged_stops_all(triton_device):
    def arrange(windows):
        windows.slot_rows = [0, 1]
        windows.slots[:] = torch.arange(11)
        by_copy(windows)
        windows.slots[1, 4] = -1

    windows = compare_windows(WindowShape(groups=2), 2, triton_device, arrange)
    assert num_written(windows.memory) == 0
    assert windows.errors.tolist() == [0, ERROR_COUNT_MISMATCH]


@pytest.mark.parametrize(
    ("groups", "slot_rows", "word"),
    [
        (2, [0], "need a row of slots each"),
        (2, [0, -1], "need a row of slots each"),
        (2, [0, 2], "do not fit a plan"),
        (2, None, "do not fit a plan"),
        (0, [0, 0], "do not fit a plan"),
    ],
)
def test_slot_rows_that_fit_neither_layers_nor_slots_are_refused(
    triton_device, groups, slot_rows, word
):
    windows = make_windows(WindowShape(groups=groups), 1, triton_device)
    windows.slot_rows = slot_rows
    with pytest.raises(ValueError, match=word):
        windows.launch()


@pytest.mark.parametrize("num_rows", [5, 9])
def test_rows_past_the_sources_are_an_overflow_unless_they_are_padding(triton_device, num_rows):
    def cut(windows):
        windows.num_sampled[:] = 3
        windows.slots[:] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1])
        windows.keys = [key[:num_rows] for key in windows.keys]
        windows.values = [value[:num_rows] for value in windows.values]

    windows = compare_windows(WindowShape(), 2, triton_device, cut)
    assert windows.errors.tolist() == ([ERROR_OVERFLOW] * 2 if num_rows == 5 else [0, 0])
    assert num_written(windows.memory) == (0 if num_rows == 5 else 9 * 2 * 2 * 8)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("count", "flag"), [(-1, 0), (1, 0), (0, 1), (0, 64), (-1, 2)])
def test_a_layer_that_staged_other_rows_or_has_a_flag_stops_all(triton_device, layer, count, flag):
    def spoil(windows):
        by_copy(windows)
        windows.num_sampled[:] = 3
        windows.options["layer_metadata"][layer, 0] += count
        windows.options["layer_metadata"][layer, 1] = flag

    windows = compare_windows(WindowShape(), 2, triton_device, spoil)
    assert num_written(windows.memory) == 0
    assert windows.errors[layer] == flag | ERROR_COUNT_MISMATCH * bool(count)
    assert windows.errors[1 - layer] == 0


def test_a_smaller_later_cache_stops_all_layers(triton_device):
    def shrink(windows):
        windows.num_sampled[:] = 3
        windows.slots[0] = 15
        windows.kv_caches[1] = windows.kv_caches[1][:3]

    windows = compare_windows(WindowShape(), 1, triton_device, shrink)
    assert num_written(windows.memory) == 0
    assert windows.errors.tolist() == [0, ERROR_SLOT_RANGE]


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


def test_strided_inputs_are_followed(triton_device):
    def apart(tensor, other):
        return torch.stack([tensor, torch.full_like(tensor, other)], dim=1)[:, 0]

    def spread(windows):
        by_index(windows)
        by_row(windows)
        for name, other in (("row_request", 0), ("row_index", 0), ("rows", 0)):
            windows.options[name] = apart(windows.options[name], other)
        windows.slots = apart(windows.slots, 0)
        windows.num_sampled = apart(windows.num_sampled, 99)
        windows.errors = apart(windows.errors, 64)
        windows.keys = [key.flip(2) for key in windows.keys]

    assert num_written(compare_windows(WindowShape(), 3, triton_device, spread).memory) > 0


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
    expected.commit_by_reference()
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
        counts = windows.num_sampled
        windows.launch_by(plan, counts, actual.errors)
        expected.commit_by_reference()
        assert_same(actual.memory.cpu(), expected.memory)
        assert not actual.errors.any()


def test_sources_that_one_launch_cannot_serve_are_refused(triton_device):
    def make(layers=2, rows=4, heads=2, width=3, dtype=torch.float32):
        return [torch.zeros(rows, heads, width, dtype=dtype, device=triton_device)] * layers

    for keys, values, word in (
        ([*make(1), *make(1, rows=5)], make(), "keys of all layers must share"),
        (make(), [*make(1), *make(1, width=4)], "values of all layers must share"),
        ([], [], "must share"),
        (make(), make(3), "one of each a layer"),
        (make(), make(dtype=torch.float16), "of one dtype"),
        (make(), make(heads=3), "heads must be the same"),
        (make(dtype=torch.int32), make(dtype=torch.int32), "torch.int32"),
    ):
        with pytest.raises(ValueError, match=word):
            StagedSources(keys, values)
    sources = StagedSources(make(), make(width=5))
    for keys, values in (
        (make(3), make(3, width=5)),
        (make(), make()),
        (make(heads=1), make(heads=1, width=5)),
        (make(dtype=torch.float16), make(dtype=torch.float16, width=5)),
    ):
        with pytest.raises(ValueError, match="cannot take the place"):
            sources.refill(keys, values)


@pytest.mark.parametrize(
    "change", [{"layers": 3}, {"kv_heads": 1}, {"widths": (3, 4)}], ids=["layers", "heads", "width"]
)
def test_sources_that_do_not_fit_the_caches_are_refused(triton_device, change):
    windows = make_windows(WindowShape(), 1, triton_device)
    other = make_windows(WindowShape(**change), 1, triton_device)
    windows.keys, windows.values = other.keys, other.values
    with pytest.raises(ValueError, match="do not fit"):
        windows.launch()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens_per_request": 3, "row_request": torch.zeros(11), "row_index": torch.zeros(11)},
        {"row_request": torch.zeros(11)},
    ],
)
def test_rows_are_given_to_requests_in_exactly_one_way(triton_device, options):
    windows = make_windows(WindowShape(), 1, triton_device)
    windows.options = options
    with pytest.raises(ValueError, match="tokens_per_request"):
        windows.launch()


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

    assert num_written(compare_windows(shape, 7, triton_device, change).memory) > 0
    assert num_written(compare_windows(shape, 7, triton_device, spoil).memory) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["dense", "tokens_before_heads"])
def test_the_shapes_of_real_models(triton_device, head_dim, dtype, layout):
    """Every block size and number of heads with every head dim, in turn."""
    for block_size, kv_heads in ((16, 1), (32, 8), (64, 3), (128, 4)):
        shape = WindowShape(
            9, 5, 3, 3, kv_heads, (head_dim, head_dim), block_size, dtype, layout=layout
        )
        assert num_written(compare_windows(shape, head_dim, triton_device).memory) > 0


@pytest.mark.gpu
def test_rounding_to_a_bfloat16_cache_is_torchs(triton_device):
    shape = WindowShape(widths=(64, 64), cache_dtype=torch.bfloat16)
    assert num_written(compare_windows(shape, 1, triton_device).memory) > 0


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
    for windows in (first, second):  # the second writes over the first
        num_sampled.copy_(windows.num_sampled)
        slots.copy_(windows.slots)
        sources.refill(windows.keys, windows.values)
        graph.replay()
        step = make_windows(shape, 1 if windows is first else 2, "cpu")
        step.kv_caches = expected.kv_caches
        step.commit_by_reference()
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
    """It may start before that one has finished, and must not read before it has."""
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
