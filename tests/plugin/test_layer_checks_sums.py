"""Sums of a cache's blocks, which show whether a step has changed another block."""

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.observe import layer_checks


def cache_of(dtype: torch.dtype, width: int) -> Tensor:
    """[blocks, heads, tokens, width], a view with other strides, as vLLM's."""
    bits = torch.randint(-99, 99, (7, 4, 2, width), dtype=torch.int8)
    return bits.to(dtype).transpose(1, 2)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.bfloat16, 8), (torch.uint8, 16), (torch.float32, 2), (torch.bfloat16, 6)],
    ids=["bf16", "fp8", "float32", "not aligned to eight bytes"],
)
def test_one_changed_element_changes_the_sum_of_its_block_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int
) -> None:
    cache = cache_of(dtype, width)
    monkeypatch.setattr(layer_checks, "SUMMED_AT_ONCE", 3 * cache[0].numel())  # in three parts
    before = layer_checks._sums(cache)
    assert torch.equal(layer_checks._sums(cache.clone()), before)
    cache[4, 1, 3, width - 1] += 1
    moved = layer_checks._sums(cache) != before
    assert moved.tolist() == [block == 4 for block in range(7)]
