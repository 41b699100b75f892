"""The local gate's reference attention, and the signed errors that it measures."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.observe.errors import (
    FIELDS,
    exact_attention,
    head_errors,
    merged_attention,
)
from nwor_kernels.attention_step import ScoreRules
from nwor_kernels.verify_attention.reference import plan_attention, verify_attention_reference

TOKENS, ROWS, HEADS, KV_HEADS, DIM = 37, 5, 6, 2, 8


def drawn(
    seed: int, rows: int = ROWS, tokens: int = TOKENS, widths: tuple[int, int] = (DIM, DIM)
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, K and V of one request, float64."""
    given = torch.Generator().manual_seed(seed)
    shapes = (rows, HEADS, widths[0]), (tokens, KV_HEADS, widths[0]), (tokens, KV_HEADS, widths[1])
    query, key, value = (torch.randn(s, generator=given, dtype=torch.float64) for s in shapes)
    return query, key, value


def by_the_kernels_reference(
    query: Tensor, key: Tensor, value: Tensor, facts: ScoreRules
) -> Tensor:
    """Attention by the project's other reference, over a cache of one block."""
    cache = torch.cat([key, value], -1).transpose(0, 1)[None].float()
    places = torch.tensor([0, ROWS]), torch.tensor([TOKENS]), torch.tensor([[0]])
    rules: dict[str, Any] = {"sliding_window": facts.sliding_window, "chunk": facts.chunk}
    plan = plan_attention(*places, TOKENS, **rules)
    output = torch.full((ROWS, HEADS, DIM), float("nan"))
    verify_attention_reference(query.float(), cache, plan, output, facts)
    return output.double()


EVERY_KIND = {
    "plain": ScoreRules(0.3),
    "softcap": ScoreRules(0.9, softcap=2.0),
    "sliding window": ScoreRules(0.3, sliding_window=7),
    "chunk": ScoreRules(0.3, chunk=9),
    "sinks": ScoreRules(0.3, sinks=torch.linspace(-1, 2, HEADS)),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_it_is_the_attention_of_the_kernels_reference(kind: str) -> None:
    given, facts = drawn(1), EVERY_KIND[kind]
    output, _ = exact_attention(*given, facts)
    expected = by_the_kernels_reference(*given, facts)
    assert torch.linalg.norm(output - expected) < 1e-6 * torch.linalg.norm(expected)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_derivative_is_that_of_differences(kind: str) -> None:
    given, facts = drawn(2), EVERY_KIND[kind]

    def at(factor: float) -> Tensor:
        return exact_attention(*given, ScoreRules(**{**vars(facts), "scale": factor}))[0]

    step = 1e-5
    expected = (at(facts.scale * (1 + step)) - at(facts.scale * (1 - step))) / (2 * step)
    _, derivative = exact_attention(*given, facts)
    assert torch.linalg.norm(derivative - expected) < 1e-8 * torch.linalg.norm(expected)


def measured(
    change_scale: float, change_gain: float, noise: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Errors of an attention with these faults and white noise of 1 % in both; by column."""
    given, facts = drawn(4), ScoreRules(0.3)
    exact, derivative = exact_attention(*given, facts)
    faulty, _ = exact_attention(*given, ScoreRules(facts.scale * (1 + change_scale)))
    draw = torch.Generator().manual_seed(5)
    size = noise * exact.square().mean().sqrt()
    ours, stock = (
        output + size * torch.randn(output.shape, generator=draw, dtype=torch.float64)
        for output in (faulty * (1 + change_gain), exact)
    )
    heads, pooled = head_errors(ours, stock, torch.arange(ROWS), exact, derivative)
    return dict(zip(FIELDS, heads.T, strict=True)), pooled


def test_signed_errors_are_the_planted_ones() -> None:
    _, pooled = measured(1e-4, 0.0, 0.0)
    assert pooled[3] == pytest.approx(1e-4, rel=1e-3)
    heads, pooled = measured(0.0, 1e-3, 0.0)
    assert pooled[0] == pytest.approx(1e-3, rel=1e-6)
    assert heads["gain"].tolist() == pytest.approx([1e-3] * HEADS, rel=1e-6)


def test_output_that_was_not_written_is_not_finite() -> None:
    exact, derivative = exact_attention(*drawn(6), ScoreRules(0.3))
    ours = exact.clone()
    ours[2, 1] = float("nan")
    heads, _ = head_errors(ours, exact, torch.arange(ROWS), exact, derivative)
    assert not torch.isfinite(heads[1, FIELDS.index("apart")])
    assert torch.isfinite(heads[0]).all()


def latents() -> tuple[Tensor, Tensor, Tensor]:
    """Query, K and V of a latent layer in float64, each element a bfloat16 number."""
    given = torch.Generator().manual_seed(7)
    query, key = (
        torch.randn(shape, generator=given).bfloat16().double()
        for shape in ((ROWS, HEADS, 24), (900, 1, 24))
    )
    return query, key, key[..., :16]


def test_merged_attention_is_exact_but_for_its_roundings() -> None:
    query, key, value = latents()
    exact, _ = exact_attention(query, key, value, ScoreRules(0.2))
    merged = merged_attention(query, key, value, 0.2, torch.float64)
    assert torch.allclose(merged, exact, rtol=1e-12, atol=1e-14)
    rounded = merged_attention(query, key, value, 0.2, torch.bfloat16)
    assert 0 < torch.linalg.norm(rounded - exact) < 2**-8 * torch.linalg.norm(exact)


@pytest.mark.parametrize("causal", [True, False])
def test_merged_attention_of_heads_that_share_k_and_v(causal: bool) -> None:
    query, key, value = drawn(3, rows=3, tokens=9, widths=(16, 8))
    exact, _ = exact_attention(query, key, value, ScoreRules(0.2))
    merged = merged_attention(query, key, value, 0.2, torch.float64, causal=causal)
    torch.testing.assert_close(merged, exact)
    rounded = merged_attention(query, key, value, 0.2, torch.bfloat16, causal=causal)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 1e-2
