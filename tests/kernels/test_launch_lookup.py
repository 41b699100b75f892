"""Launches of one kernel: a binary is looked for once for all that it depends on."""

from typing import Any

import pytest
import torch

from nwor_kernels.launch import Launches

CONSTANTS = {"ROWS": 16, "DIM": 64}


class Kernel:
    """Stands in for a `triton.jit` function, whose compiled form says what it was given."""

    arg_names = ("query", "sinks", "scale", "stride", *CONSTANTS)

    def __init__(self) -> None:
        self.searches: list[tuple[Any, ...]] = []
        self.repeats: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def search(*arguments: Any, **by_name: Any) -> Any:
            self.searches.append((grid, *arguments, *by_name.values()))
            return Compiled(self.repeats)

        return search


class Compiled:
    def __init__(self, repeats: list[tuple[Any, ...]]) -> None:
        self._repeats = repeats

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self._repeats.append((grid, *arguments))


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_the_second_launch_is_not_searched_for(kernel: Kernel) -> None:
    launches = Launches(kernel, free=frozenset({"scale"}))
    query, other = torch.randn(2, 8), torch.randn(3, 8)
    launches((4, 1, 1), (query, None, 0.5, 8), CONSTANTS, num_warps=4)
    launches((4, 1, 1), (other, None, 0.7, 8), CONSTANTS, num_warps=4)
    assert len(kernel.searches) == 1
    assert kernel.repeats == [((4, 1, 1), other, None, 0.7, 8, 16, 64)]


@pytest.mark.parametrize(
    ("grid", "query", "sinks", "stride", "constants", "warps"),
    [
        pytest.param((5, 1, 1), torch.ones(8), None, 8, CONSTANTS, 4, id="grid"),
        pytest.param((4, 1, 1), torch.ones(8).half(), None, 8, CONSTANTS, 4, id="dtype"),
        pytest.param((4, 1, 1), torch.ones(9)[1:], None, 8, CONSTANTS, 4, id="alignment"),
        pytest.param((4, 1, 1), torch.ones(8), torch.ones(8), 8, CONSTANTS, 4, id="none"),
        pytest.param((4, 1, 1), torch.ones(8), None, 1, CONSTANTS, 4, id="stride"),
        pytest.param((4, 1, 1), torch.ones(8), None, 8, {**CONSTANTS, "DIM": 32}, 4, id="dim"),
        pytest.param((4, 1, 1), torch.ones(8), None, 8, CONSTANTS, 8, id="warps"),
    ],
)
def test_what_a_binary_depends_on_is_searched_for_again(
    kernel: Kernel, grid: Any, query: Any, sinks: Any, stride: int, constants: Any, warps: int
) -> None:
    launches = Launches(kernel, free=frozenset({"scale"}))
    launches((4, 1, 1), (torch.ones(8), None, 0.5, 8), CONSTANTS, num_warps=4)
    launches(grid, (query, sinks, 0.5, stride), constants, num_warps=warps)
    assert len(kernel.searches) == 2
    assert not kernel.repeats
