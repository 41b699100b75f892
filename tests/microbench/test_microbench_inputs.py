"""What the implementations are given, and whether a wrong result is seen; no GPU, no Triton."""

from collections import Counter

import pytest
import torch
from accepted_rows import accepted_rows
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.microbench.cases import Group, Shape, Window
from nwor_bench.microbench.inputs import (
    FP8_POISON,
    SlotPool,
    count_sets,
    difference,
    leading,
    make_caches,
    make_set,
    poison,
    spread,
)

CPU = torch.device("cpu")
SHAPE = Shape(layers=2, heads=4, kv_heads=2, head_dim=64)
WINDOWS = st.builds(Window, st.integers(1, 20), st.integers(1, 15))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(WINDOWS, st.integers(0, 9), st.data())
@examples(30)
def test_accepted_tokens_are_spread_and_lead_their_windows(window, seed, data) -> None:
    total = data.draw(st.integers(1, window.tokens))
    counts = spread(total, window, generator(seed))
    assert counts.dtype == torch.int32
    assert int(counts.sum()) == total
    assert 0 <= int(counts.min()) <= int(counts.max()) <= window.drafts
    accepted = accepted_rows(counts, window.tokens, tokens_per_request=window.drafts)
    assert leading(counts, window.drafts).tolist() == accepted.nonzero().flatten().tolist()


@given(WINDOWS, st.sampled_from([16, 32]), st.integers(1, 4), st.integers(0, 9))
@examples(30)
def test_no_slot_is_given_twice(window, block_size, sets, seed) -> None:
    pool = SlotPool(window, block_size, sets, generator(seed))
    slots = torch.stack([pool.take() for _ in range(sets)])
    assert Counter(slots.flatten().tolist()).most_common(1)[0][1] == 1
    assert 0 <= int(slots.min()) <= int(slots.max()) < pool.num_blocks * block_size
    offsets = slots.view(sets, window.requests, window.drafts) % block_size
    steps = (offsets[..., 1:] - offsets[..., :-1]) % block_size
    assert bool((steps == 1).all())  # consecutive positions, over the end of a block too


def test_rows_are_views_of_one_fused_output_and_the_chosen_are_the_same_rows() -> None:
    choice = torch.tensor([1, 4, 5])
    slots = torch.randperm(100)[:6]
    one = make_set(SHAPE, 6, slots, choice, CPU)
    width = (SHAPE.heads + 2 * SHAPE.kv_heads) * SHAPE.head_dim
    assert one.all.keys[0].stride() == (width, SHAPE.head_dim, 1)
    for layer in range(SHAPE.layers):
        assert torch.equal(one.chosen.keys[layer], one.all.keys[layer][choice])
        assert torch.equal(one.chosen.values[layer], one.all.values[layer][choice])
        assert not torch.equal(one.all.keys[layer], one.all.values[layer])
    assert torch.equal(one.chosen.slots, slots[choice])


def test_sets_touch_more_than_any_l2_within_reason() -> None:
    assert count_sets(1) == 32
    assert count_sets(100 << 20) == 6
    assert count_sets(1 << 40) == 2


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_every_wrong_byte_is_seen(cache_dtype: str) -> None:
    expected = make_caches(SHAPE, 3, cache_dtype, CPU)
    written = torch.randn(2, 5, 128).bfloat16()
    if cache_dtype == "fp8":
        written = written.to(torch.float8_e4m3fn).view(torch.uint8)
    expected[1][2, :, 3:8] = written
    found = [cache.clone() for cache in expected]
    assert difference(found, expected) == ""
    found[1][2, 1, 4, 7] = FP8_POISON if cache_dtype == "fp8" else float("nan")
    assert difference(found, expected).startswith("layer 1: ")
    poison(found)
    assert "layer 1" in difference(found, expected)


def test_attentions_reference_is_attention() -> None:
    pytest.importorskip("triton")
    from nwor_bench.microbench.attention import AttentionBuffers

    torch.manual_seed(5)
    group = Group("verify_attention", "bf16", Window(3, 4), context=37)
    step = AttentionBuffers(group, SHAPE, CPU)
    dense = []
    for request in range(3):
        kv = step.cache[step.table[request].long()].transpose(1, 2).flatten(0, 1)[:42].double()
        key, value = kv.repeat_interleave(2, dim=1).transpose(0, 1).chunk(2, dim=-1)
        query = step.query[5 * request : 5 * request + 5].double().transpose(0, 1)
        hidden = torch.ones(5, 42, dtype=torch.bool).tril(37)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
        dense.append(out.transpose(0, 1))
    wanted = step.expected()
    torch.testing.assert_close(wanted.double(), torch.cat(dense), rtol=1e-5, atol=1e-5)
    assert step.wrong(lambda: step.output.copy_(wanted), wanted) == ""
    assert "relative error" in step.wrong(lambda: step.output.copy_(wanted * 1.02), wanted)
    assert "nan" in step.wrong(lambda: step.output[1:].copy_(wanted[1:]), wanted)
    step.spoil_window(float("nan"))
    torch.testing.assert_close(step.expected(), wanted)  # the window is read from its own K/V
