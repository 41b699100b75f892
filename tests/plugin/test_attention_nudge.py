"""What is moved by a rounding step, by how much, and that nothing is left of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.observe.attention_nudge import AttentionNudge


class Attention:
    """Attention that returns the queries."""

    def forward(
        self, layer: Any, query: Tensor, key: Any, value: Any, cache: Any, meta: Any, output: Tensor
    ) -> Tensor:
        return output.copy_(query)


def layers_of(count: int) -> list[Any]:
    return [SimpleNamespace(impl=Attention()) for _ in range(count)]


def run(layer: Any, query: Tensor, metadata: object = "a step") -> Tensor:
    output = torch.full_like(query, torch.nan)
    result: Tensor = layer.impl.forward(layer, query, None, None, None, metadata, output)
    return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_element_moves_by_one_or_two_steps_of_its_dtype(dtype: torch.dtype) -> None:
    """An element just above a power of two has steps of twice the relative size of one below."""
    (layer,) = layers_of(1)
    query = torch.randn(500, 4, 16).to(dtype)
    query[query.abs() < 1e-3] = 1.0  # float16 has no steps of that relative size further down
    nudge = AttentionNudge([layer])
    nudge.switch(True)
    moved = run(layer, query)
    steps = (moved.view(torch.int16).int() - query.view(torch.int16).int()).abs()
    assert set(steps.flatten().tolist()) == {1, 2}
    up = (moved.float().abs() > query.float().abs()).float().mean()
    assert 0.45 < up < 0.55


def test_float32_moves_by_sixteen_steps() -> None:
    (layer,) = layers_of(1)
    AttentionNudge([layer]).switch(True)
    query = torch.rand(100, 8) + 1.0
    relative = (run(layer, query).double() / query.double() - 1).abs()
    assert relative.min() > 15 * torch.finfo(torch.float32).eps
    assert relative.max() < 17 * torch.finfo(torch.float32).eps


def test_a_dummy_step_is_left_alone_and_off_is_stock() -> None:
    (layer,) = layers_of(1)
    stock = layer.impl.forward
    query = torch.randn(5, 8)
    nudge = AttentionNudge([layer])
    nudge.switch(True)
    assert torch.equal(run(layer, query, metadata=None), query)
    nudge.switch(False)
    nudge.switch(False)
    assert layer.impl.forward == stock
    assert torch.equal(run(layer, query), query)
