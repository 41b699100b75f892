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


@pytest.fixture
def layer() -> Any:
    return SimpleNamespace(impl=Attention())


@pytest.fixture
def nudge(layer: Any) -> AttentionNudge:
    made = AttentionNudge([layer])
    made.switch(True)
    return made


def run(layer: Any, query: Tensor, metadata: object = "a step") -> Tensor:
    output = torch.full_like(query, torch.nan)
    result: Tensor = layer.impl.forward(layer, query, None, None, None, metadata, output)
    return result


@pytest.mark.usefixtures("nudge")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_element_moves_by_one_or_two_steps_of_its_dtype(
    layer: Any, dtype: torch.dtype
) -> None:
    """An element just above a power of two has steps of twice the relative size of one below."""
    query = torch.randn(500, 4, 16).to(dtype)
    query[query.abs() < 1e-3] = 1.0  # float16 has no steps of that relative size further down
    moved = run(layer, query)
    steps = (moved.view(torch.int16).int() - query.view(torch.int16).int()).abs()
    assert set(steps.flatten().tolist()) == {1, 2}
    up = (moved.float().abs() > query.float().abs()).float().mean()
    assert 0.45 < up < 0.55


@pytest.mark.usefixtures("nudge")
def test_float32_moves_by_sixteen_steps(layer: Any) -> None:
    query = torch.rand(100, 8) + 1.0
    relative = (run(layer, query).double() / query.double() - 1).abs() / torch.finfo().eps
    assert 15 < relative.min() <= relative.max() < 17


def test_a_dummy_step_is_left_alone_and_off_is_stock(layer: Any) -> None:
    stock, query = layer.impl.forward, torch.randn(5, 8)
    nudge = AttentionNudge([layer])
    nudge.switch(True)
    assert torch.equal(run(layer, query, metadata=None), query)
    nudge.switch(False)
    nudge.switch(False)
    assert layer.impl.forward == stock
