"""Staging buffers over real caches: sizes, refusals, and direct writes as stock vLLM's."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.layers import LayerCache, StagingUnavailable
from nwor_bench.plugin.runner_v1.staging import (
    StagingBuffers,
    ValidationRefused,
    Validator,
    accepted_on_host,
)
from nwor_bench.records.types import ScvMode

NAN = float("nan")


def layer_cache(
    name="layer", *, blocks=3, kv_heads=2, block_size=4, widths=(3, 5), dtype=torch.float32,
    cache_dtype=None, **more,
):  # fmt: skip
    cache = torch.full((blocks, kv_heads, block_size, sum(widths)), NAN, dtype=cache_dtype or dtype)
    return LayerCache(name, cache, widths[0], dtype, **more)


def make_buffers(layers=3, capacity=4, **kw):
    return StagingBuffers([layer_cache(f"layer{i}", **kw) for i in range(layers)], capacity)


def kv_of_layer(layer, num_tokens=6, kv_heads=2, widths=(3, 5)):
    rng = torch.Generator().manual_seed(layer)
    return (
        torch.randn(num_tokens, kv_heads, widths[0], generator=rng),
        torch.randn(num_tokens, kv_heads, widths[1], generator=rng),
    )


def slot_of(cache, slot):
    block, offset = divmod(slot, cache.shape[2])
    return cache[block, :, offset]


def assert_cache_holds(cache, entries):
    """Exactly these slots hold (key row, value row); all others were never written."""
    for slot in range(cache.shape[0] * cache.shape[2]):
        if slot in entries:
            assert torch.equal(slot_of(cache, slot), torch.cat(entries[slot], dim=-1))
        else:
            assert slot_of(cache, slot).isnan().all()


@pytest.mark.parametrize(
    ("kw", "by_hand"),
    [
        # layers x heads x (K width + V width) x bytes of the cache's dtype
        ({"layers": 3}, 3 * 2 * 8 * 4),
        ({"layers": 28, "kv_heads": 8, "widths": (128, 128), "dtype": torch.bfloat16}, 114_688),
        ({"layers": 1, "dtype": torch.float32, "cache_dtype": torch.bfloat16}, 2 * 8 * 2),
        ({"layers": 2, "dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}, 2 * 2 * 8),
    ],
)
def test_bytes_per_token_are_the_caches_over_all_layers(kw, by_hand):
    assert make_buffers(blocks=1, **kw).bytes_per_token == by_hand


@pytest.mark.parametrize(
    "other",
    [
        {"kv_heads": 1},
        {"widths": (4, 5)},
        {"widths": (4, 4)},  # the same cache, cut in another place
        {"block_size": 8},
        {"blocks": 2},
        {"dtype": torch.bfloat16, "cache_dtype": torch.float32},
        {"cache_dtype": torch.bfloat16},
    ],
)
def test_layers_that_differ_have_buffers_of_their_own(other):
    """A window is committed in both shapes, each layer to its own cache and its group's slots."""
    first, second = layer_cache("a"), layer_cache("b", **other, slot_row=1)
    buffers = StagingBuffers([first, second], 4, grouped=True)
    assert buffers.layers == [first, second]
    rows, slots = torch.tensor([1, 2]), torch.tensor([[7, 0], [2, 5]])
    held = []  # in the cache's type, of each layer and draft
    for number, layer in enumerate(buffers.layers):
        width = layer.kv_cache.shape[3] - layer.head_dim
        kv = kv_of_layer(number, 6, layer.kv_cache.shape[1], (layer.head_dim, width))
        kv = tuple(tensor.to(layer.dtype) for tensor in kv)
        assert buffers.stage(number, *kv, rows) == ""
        staged = buffers.key[number], buffers.value[number]
        assert all(torch.equal(a[:2], b[1:3]) for a, b in zip(staged, kv, strict=True))
        held.append([tuple(t[i].to(layer.kv_cache.dtype) for t in staged) for i in (0, 1)])
    assert buffers.commit(slots, torch.tensor([True, False])) == ""
    assert_cache_holds(first.kv_cache, {7: held[0][0]})
    assert_cache_holds(second.kv_cache, {2: held[1][0]})
    buffers.write_directly([1], slots)
    assert_cache_holds(second.kv_cache, {2: held[1][0], 5: held[1][1]})


def test_no_layers_at_all():
    with pytest.raises(StagingUnavailable, match=r"^no_target_layers$"):
        StagingBuffers([], 4)


@pytest.mark.parametrize(
    ("key_shape", "value_shape"),
    [
        ((6, 2, 4), (6, 2, 5)),
        ((6, 2, 3), (6, 2, 3)),
        ((6, 1, 3), (6, 2, 5)),
        ((6, 2, 3), (6, 1, 5)),
        ((6, 6), (6, 10)),
    ],
)
def test_stage_refuses_another_shape(key_shape, value_shape):
    buffers = make_buffers()
    buffers.key[0].fill_(NAN)
    said = buffers.stage(0, torch.ones(key_shape), torch.ones(value_shape), torch.tensor([0]))
    assert said == "kv_shape"
    assert buffers.key[0].isnan().all()
    assert buffers.metadata.tolist() == [[0, 0]] * 3


def test_commit_names_every_problem_and_writes_nothing():
    buffers = make_buffers(capacity=2)
    rows = torch.tensor([1, 2])
    buffers.stage(0, *kv_of_layer(0), rows)
    buffers.stage(1, *kv_of_layer(1), torch.tensor([1, 2, 3]))
    said = buffers.commit(torch.tensor([0, 12]), torch.tensor([True, True]))
    assert said == "overflow+count_mismatch+slot_range"
    for layer in buffers.layers:
        assert_cache_holds(layer.kv_cache, {})


VOCAB = 20
CPU = torch.device("cpu")

DEVICE_MODES = [ScvMode.GRAPH, ScvMode.ADAPTIVE]


def make_validator(mode=ScvMode.OFF, capacity=64):
    validator = Validator(capacity, VOCAB, CPU)
    validator.mode = mode
    return validator


@st.composite
def sampled_windows(draw):
    """(ids as rejection sampling returns them, drafts, accepted drafts) of each request."""
    drafts = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    kept = [draw(st.integers(0, n)) for n in drafts]
    prefills = [draw(st.booleans()) and n == 0 for n in drafts]
    width = max(drafts) + 1
    ids = torch.full((len(drafts), width), -1)
    for row, (count, prefill) in enumerate(zip(kept, prefills, strict=True)):
        if not prefill:
            ids[row, : count + 1] = draw(st.integers(0, VOCAB - 1))
    return ids, drafts, kept


@examples(100)
@given(window=sampled_windows(), mode=st.sampled_from(list(ScvMode)))
def test_what_rejection_sampling_decided_is_read_back(window, mode):
    ids, drafts, kept = window
    validation = make_validator(mode).validate(ids, drafts)
    assert validation.num_accepted == kept
    mask = [draft < k for n, k in zip(drafts, kept, strict=True) for draft in range(n)]
    assert validation.accepted.tolist() == mask
    assert accepted_on_host(ids.tolist(), drafts, VOCAB) == kept


@pytest.mark.parametrize("mode", list(ScvMode))
@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        *(
            (torch.ones(s).long(), "sampled_ids_shape") for s in ((3, 4), (1, 4), (0, 4))
        ),  # requests
        *(
            (torch.ones(shape).long(), "sampled_ids_shape")
            for shape in ((3, 4), (1, 4), (0, 4), (2,), (2, 4, 1), ())
        ),
        *(
            (torch.ones(2, 4, dtype=dtype), "sampled_ids_dtype")
            for dtype in (torch.float32, torch.half, torch.bool, torch.complex64)
        ),
    ],
)
def test_ids_that_cannot_belong_to_the_window_are_refused(mode, ids, reason):
    validator = make_validator(mode)
    with pytest.raises(ValidationRefused, match=f"^{reason}$"):
        validator.validate(ids, (3, 2))
    assert not validator.counters  # the caller counts a refusal, under its reason
    assert not validator.fallbacks


@pytest.mark.parametrize("mode", list(ScvMode))
def test_more_drafts_than_the_buffers_hold_are_refused(mode):
    validator = make_validator(mode, capacity=5)
    ids = torch.ones(2, 4).long()
    assert validator.validate(ids, (3, 2)).num_accepted == [3, 2]
    with pytest.raises(ValidationRefused, match=r"^more_drafts_than_capacity$"):
        validator.validate(ids, (3, 3))


@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_the_host_validates_for_the_device_and_each_time_is_counted(mode):
    validator = make_validator(mode)
    for _ in range(3):
        validation = validator.validate(torch.ones(1, 3).long(), (2,))
        assert validation.fallback_reason == "no_cuda"
    assert validator.counters == {"scv_fallback_count": 3}
    assert validator.fallbacks == {"no_cuda": 3}
