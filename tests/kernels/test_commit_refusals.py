"""What one launch of a commit cannot serve is refused before it."""

import pytest
import torch

pytest.importorskip("triton")

from window_cases import WindowShape, make_windows

from nwor_kernels.commit.plan import CommitPlan, StagedSources


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
def test_caches(triton_device, shapes, dtypes, word):
    caches = [
        torch.zeros(shape, dtype=dtype, device=triton_device)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    with pytest.raises(ValueError, match=word):
        CommitPlan(caches)


def test_scales(triton_device):
    cache = torch.zeros(2, 3, 4, 8, dtype=torch.uint8, device=triton_device)
    one, two, three, six = (torch.ones(n, device=triton_device) for n in (1, 2, 3, 6))
    for caches, k_scales, v_scales, named in (
        ([cache], None, [one], "k_scales"),
        ([cache], [one], None, "v_scales"),
        ([cache], [one, one], [one], "k_scales"),
        ([cache], [two], [one], "k_scales"),
        ([cache], [one.double()], [one], "k_scales"),
        ([cache], [six[::2]], [one], "k_scales"),
        ([cache, cache], [one, one], [one, three], "v_scales"),
        ([cache.float()], [one], [one], "k_scales"),
    ):
        with pytest.raises(ValueError, match=named):
            CommitPlan(caches, k_scales, v_scales)


def test_sources(triton_device):
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
    for changed in ({"layers": 3}, {"heads": 1}, {"dtype": torch.float16}):
        with pytest.raises(ValueError, match="cannot take the place"):
            sources.refill(make(**changed), make(width=5, **changed))
    with pytest.raises(ValueError, match="cannot take the place"):
        sources.refill(make(), make())


@pytest.mark.parametrize(
    ("groups", "changed", "word"),
    [
        (2, {"slot_rows": [0]}, "need a row of slots each"),
        (2, {"slot_rows": [0, -1]}, "need a row of slots each"),
        (2, {"slot_rows": [0, 2]}, "do not fit a plan"),
        (2, {"slot_rows": None}, "do not fit a plan"),
        (0, {"slot_rows": [0, 0]}, "do not fit a plan"),
        (0, {"options": {}}, "tokens_per_request"),
        (0, {"options": {"row_request": torch.zeros(11)}}, "tokens_per_request"),
        (0, {"options": {"tokens_per_request": 3, "row_request": torch.zeros(11),
                         "row_index": torch.zeros(11)}}, "tokens_per_request"),
        *((0, WindowShape(**other), "do not fit")
          for other in ({"layers": 3}, {"kv_heads": 1}, {"widths": (3, 4)})),
    ],
)  # fmt: skip
def test_windows_that_do_not_fit_the_plan(triton_device, groups, changed, word):
    windows = make_windows(WindowShape(groups=groups), 1, triton_device)
    if isinstance(changed, WindowShape):
        other = make_windows(changed, 1, triton_device)
        changed = {"keys": other.keys, "values": other.values}
    vars(windows).update(changed)
    with pytest.raises(ValueError, match=word):
        windows.launch()
