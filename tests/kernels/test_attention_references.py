"""The CPU's attention against its definition, and staged tokens against written ones."""

import pytest
import torch
from attention_cases import (
    Request,
    Step,
    attend_slowly,
    make_step,
    poison_drafts,
    staged_rows,
)
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_inputs import SEEDS
from torch import Tensor

from nwor_kernels.attention_step import ScoreRules
from nwor_kernels.verify_attention.reference import (
    BATCHED_QUERY_LIMIT,
    plan_attention,
    verify_attention_reference,
)

MIXED = [
    Request(cached=29, queries=5, drafts=4),  # a decode window across a block border
    Request(cached=0, queries=BATCHED_QUERY_LIMIT + 7),  # a prompt's first chunk
    Request(cached=3, queries=1),  # a plain decode
    Request(cached=40, queries=BATCHED_QUERY_LIMIT + 1),  # a later chunk
    Request(cached=5, queries=0),  # scheduled with nothing
    Request(cached=15, queries=BATCHED_QUERY_LIMIT, drafts=BATCHED_QUERY_LIMIT - 1),
    Request(cached=16, queries=3, drafts=2),
]

REQUESTS = st.lists(
    st.builds(
        lambda cached, queries, drafts: Request(cached, queries, min(drafts, max(queries - 1, 0))),
        cached=st.integers(0, 40),
        queries=st.one_of(st.integers(1, 6), st.integers(0, 20)),
        drafts=st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)

FEATURES = ["plain", "softcap", "sinks", "all"]


def score_options(feature: str, heads: int) -> dict[str, object]:
    options: dict[str, object] = {}
    if feature in ("softcap", "all"):
        options["softcap"] = 1.5
    if feature in ("sinks", "all"):
        options["sinks"] = torch.linspace(-1.0, 2.0, heads)
    return options


def attend(
    step: Step,
    kv_cache: Tensor | None = None,
    *,
    staged: tuple[Tensor, Tensor, Tensor] | None = None,
    causal: bool = True,
    sliding_window: int = -1,
    chunk: int = -1,
    **options,
) -> Tensor:
    """Run the reference on NaN output, so that rows it leaves out show."""
    rows, key, value = staged or (None, None, None)
    plan = plan_attention(
        step.query_start_loc,
        step.seq_lens,
        step.block_table,
        step.block_size,
        causal=causal,
        sliding_window=sliding_window,
        chunk=chunk,
        staged_token_rows=rows,
    )
    output = torch.full_like(step.query, float("nan"))
    verify_attention_reference(
        step.query,
        step.kv_cache if kv_cache is None else kv_cache,
        plan,
        output,
        ScoreRules(step.scale, **options),
        staged and (key, value),
    )
    return output


def assert_close_to_definition(output: Tensor, step: Step, **options) -> None:
    tolerance = 3e-2 if output.dtype is torch.bfloat16 else 2e-5
    expected = torch.from_numpy(attend_slowly(step, **options))
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def assert_equal_bits(one: Tensor, other: Tensor) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    assert one.dtype == other.dtype
    assert torch.equal(one.view(bits), other.view(bits))


@examples(80)
@given(
    requests=REQUESTS,
    ratio=st.sampled_from([1, 3, 4, 7]),
    kv_heads=st.integers(1, 2),
    block_size=st.sampled_from([16, 32, 64]),
    seen=st.sampled_from(
        [{}, {"sliding_window": 1}, {"sliding_window": 7}, {"chunk": 1}, {"chunk": 6},
         {"sliding_window": 7, "chunk": 16}, {"causal": False},
         {"causal": False, "sliding_window": 9}]
    ),
    feature=st.sampled_from(FEATURES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=SEEDS,
)  # fmt: skip
@example(MIXED, 3, 2, 16, {}, "plain", torch.float32, 1)
@example(MIXED, 3, 2, 16, {"causal": False, "sliding_window": 9}, "all", torch.bfloat16, 2)
def test_any_batch_staged_against_the_definition(
    requests, ratio, kv_heads, block_size, seen, feature, dtype, seed
):
    heads = ratio * kv_heads
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": 4, "block_size": block_size}
    step = make_step(requests, dtype=dtype, seed=seed, **shape)
    options = {**score_options(feature, heads), **seen}
    staged = staged_rows(step, list(range(len(step.drafts()))))
    output = attend(step, poison_drafts(step), staged=staged, **options)
    assert_close_to_definition(output, step, **options)


@examples(150)
@given(
    requests=REQUESTS,
    ratio=st.sampled_from([1, 3, 4, 7]),
    block_size=st.sampled_from([16, 32, 64]),
    sliding_window=st.sampled_from([-1, 1, 5]),
    causal=st.booleans(),
    feature=st.sampled_from(FEATURES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=SEEDS,
    data=st.data(),
)
def test_staged_tokens_attend_bit_by_bit_like_written_ones(
    requests, ratio, block_size, sliding_window, causal, feature, dtype, seed, data
):
    step = make_step(requests, heads=2 * ratio, block_size=block_size, dtype=dtype, seed=seed)
    options = {
        **score_options(feature, 2 * ratio),
        "causal": causal,
        "sliding_window": sliding_window,
    }
    order = data.draw(st.permutations(range(len(step.drafts()))))
    staged = attend(step, poison_drafts(step), staged=staged_rows(step, order), **options)
    assert_equal_bits(staged, attend(step, **options))


def test_a_staged_row_belongs_to_only_one_request():
    # The first request ends with its block, so that one row too many has no place to go.
    step = make_step([Request(12, 4), Request(3, 2, drafts=2), Request(0, 16)], seed=5)
    staged = staged_rows(step, [0, 1])
    assert_equal_bits(attend(step, poison_drafts(step), staged=staged), attend(step))


def test_padding_among_the_staged_rows_belongs_to_nobody():
    step = make_step([Request(30, 4, 3), Request(7, 3, 2)], seed=4)
    rows, key, value = staged_rows(step, list(range(5)))
    padded = torch.cat([torch.tensor([-1]), rows, torch.tensor([-1, -1])])
    nan = torch.full_like(key[:1], float("nan"))
    key, value = torch.cat([nan, key]), torch.cat([nan, value])
    output = attend(step, poison_drafts(step), staged=(padded, key, value))
    assert_equal_bits(output, attend(step))


def test_the_cache_and_the_staged_rows_are_only_read():
    step = make_step(MIXED, seed=6)
    cache = poison_drafts(step)
    staged = staged_rows(step, list(range(len(step.drafts()))))
    copies = [cache.clone(), *(tensor.clone() for tensor in staged)]
    attend(step, cache, staged=staged)
    for tensor, copy in zip((cache, *staged), copies, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", ["layers_interleaved", "tokens_before_heads"])
def test_a_cache_with_gaps_and_a_fused_query_give_the_same_bits(layout):
    step = make_step(MIXED, seed=8)
    right = attend(step)
    if layout == "layers_interleaved":
        step.kv_cache = torch.stack([step.kv_cache, -step.kv_cache], dim=1)[:, 0]
    else:
        step.kv_cache = step.kv_cache.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.cat([step.query, step.query], dim=1)
    step.query = fused[:, : step.query.shape[1]]
    assert not step.kv_cache.is_contiguous()
    assert not step.query.is_contiguous()
    assert_equal_bits(attend(step).contiguous(), right)


def test_a_step_without_queries_plans_nothing():
    plan = plan_attention(
        torch.zeros(3, dtype=torch.int32),
        torch.tensor([4, 5], dtype=torch.int32),
        torch.zeros(2, 1, dtype=torch.int32),
        16,
    )
    assert list(plan) == []
