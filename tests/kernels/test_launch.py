"""Launches: one look-up of each binary, and what a bound launch passes on."""

from typing import Any

import pytest
import torch

from nwor_kernels.launch import Launch, Launches

NAMES = ("table", "counts", "absent", "flags", "size", "small", "number", "CONSTANT")


class StandInKernel:
    """A compiled kernel; notes its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


class StandInJit:
    """A `triton.jit` function of NAMES; notes its launches. An interpreted one compiles nothing."""

    arg_names = NAMES

    def __init__(self, kernel: StandInKernel | None):
        self.kernel = kernel
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **by_name: Any) -> StandInKernel | None:
            self.launches.append((grid, *arguments, by_name))
            return self.kernel

        return run


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_a_bound_launch_passes_on_what_is_fixed_and_what_differs(is_interpreted: bool) -> None:
    kernel = StandInKernel()
    jit = StandInJit(None if is_interpreted else kernel)
    fixed = (torch.randn(2), None, torch.randn(3), 2**40, 9)
    run = Launch(jit, (2, 1, 1), {"CONSTANT": 8}, num_warps=4).bind(*fixed, at=1)
    counts = [torch.ones(n + 1, dtype=torch.int32) for n in range(3)]
    for number, tensor in enumerate(counts):
        run(tensor, number)
    by_name = {"CONSTANT": 8, "num_warps": 4}
    expected = [(fixed[0], tensor, *fixed[1:], n) for n, tensor in enumerate(counts)]
    looked_up = expected if is_interpreted else expected[:1]
    assert jit.launches == [((2, 1, 1), *each, by_name) for each in looked_up]
    assert kernel.launches == [((2, 1, 1), *each, 8) for each in expected[len(looked_up) :]]


GIVEN = (torch.ones(8), torch.ones(8), None, None, 2**40, 9, 5)
LOOKED_UP: dict[str, Any] = {"grid": (4, 1, 1), "arguments": GIVEN, "constants": {"CONSTANT": 8}}


def launch_twice(**changes: Any) -> tuple[StandInJit, StandInKernel]:
    """A launch of LOOKED_UP and one with changes, through `Launches` with `number` free."""
    kernel = StandInKernel()
    jit = StandInJit(kernel)
    launches = Launches(jit, free=frozenset({"number"}))
    launches(**LOOKED_UP, num_warps=4)
    launches(**{**LOOKED_UP, "num_warps": 4, **changes})
    return jit, kernel


def test_a_binary_is_looked_up_once():
    again = (torch.randn(3, 8), *GIVEN[1:6], 7)
    jit, kernel = launch_twice(arguments=again)
    assert len(jit.launches) == 1
    assert kernel.launches == [((4, 1, 1), *again, 8)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"grid": (5, 1, 1)}, id="grid"),
        pytest.param({"arguments": (torch.ones(8).half(), *GIVEN[1:])}, id="dtype"),
        pytest.param({"arguments": (torch.ones(9)[1:], *GIVEN[1:])}, id="alignment"),
        pytest.param({"arguments": (*GIVEN[:2], torch.ones(8), *GIVEN[3:])}, id="none"),
        pytest.param({"arguments": (*GIVEN[:5], 1, 5)}, id="number"),
        pytest.param({"constants": {"CONSTANT": 16}}, id="constant"),
        pytest.param({"num_warps": 8}, id="warps"),
    ],
)
def test_another_binary_is_looked_up_again(changes):
    jit, kernel = launch_twice(**changes)
    assert len(jit.launches) == 2
    assert not kernel.launches
