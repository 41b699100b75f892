"""What the local gate measures of a commit's rows, on a cache without an engine."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nwor_bench.plugin.layers import slot_index
from nwor_bench.plugin.observe.layer_checks import LayerChecks, StepRows, StepTables
from nwor_bench.plugin.window import LayerCall, State

NAME = "layers.0"
STEP = StepRows([0, 3, 6], [2, 2], {NAME: torch.tensor([5, 6, 7, 13, 14, -1])}, "eager")
"""Two requests, each with a certain token and two drafts; the last draft has no slot."""


class Layer:
    """A layer with four blocks of four tokens, one of them in use by no request."""

    name = owner = NAME

    def __init__(self) -> None:
        self.cache = torch.randn(4, 2, 4, 6)

    def cache_rows(self) -> Tensor:
        return self.cache

    def stock_write(self, call: LayerCall, slots: Tensor) -> None:
        real = slots >= 0
        self.cache[slot_index(self.cache, slots[real])] = torch.cat([call.key, call.value], -1)[
            real
        ]

    def wrong(self, slot: int) -> None:
        self.cache[slot // 4, 1, slot % 4, 3] += 1


def nothing(layer: Layer) -> None:
    """A sound commit."""


@pytest.mark.parametrize(
    ("change", "differing", "stranger"),
    [
        (nothing, None, None),
        (lambda layer: layer.wrong(14), [1, 1, 1], None),  # an accepted draft
        (lambda layer: layer.wrong(7), None, [1, 3]),  # a rejected draft
        (lambda layer: layer.wrong(4), None, [1, 0]),  # a row of another step
        (lambda layer: layer.wrong(9), None, [2, -1]),  # in a block of no request
    ],
)
def test_a_commit_leaves_stocks_rows_and_no_others(
    change: Callable[[Layer], None], differing: list[int] | None, stranger: list[int] | None
) -> None:
    layer: Any = Layer()
    checks = LayerChecks([layer], SimpleNamespace(trace=None), None, {NAME})
    call = LayerCall(key=torch.randn(6, 2, 4), value=torch.randn(6, 2, 2))
    checks.trace.layers.calls[NAME] = call
    checks.begin(STEP)
    kept = torch.tensor([5, 6, 13, 14, -1, -1])  # all but one draft are accepted
    layer.stock_write(
        LayerCall(*(each[[0, 1, 3, 4, 0, 0]] for each in (call.key, call.value))), kept
    )
    change(layer)
    after = layer.cache.clone()
    tables = {NAME: StepTables(torch.tensor([8, 15]), torch.tensor([[1, 0], [3, 0]]), None)}
    window: Any = SimpleNamespace(state=State.COMMITTED, is_control=False)
    assert checks.ended(window, [2, 3], lambda: tables)
    assert torch.equal(layer.cache, after)  # stock's write is taken back
    [found] = checks.take()
    [entry] = found["layers"]
    assert (found["rows"], found["rejected"], entry["written"]) == (6, 1, 4)
    assert (entry["differing"], entry["first_differing"]) == (int(differing is not None), differing)
    assert (entry["strangers"], entry["first_stranger"]) == (int(stranger is not None), stranger)
