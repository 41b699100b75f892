"""Repeated launches of a Triton kernel: less host time, no gap after the kernel before."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Launch:
    """A kernel with its grid and compile-time parameters, launched again and again.

    Triton looks at every argument of every launch to find the binary, which takes the host longer
    than the launch. Here only the first launch looks. So callers keep one `Launch` for each device,
    set of dtypes, arguments that are None, compile-time parameters, and the numbers and alignments
    that the kernel does not exclude from specialisation.

    Args:
        kernel: a `triton.jit` function, its compile-time parameters last.
        grid: programs in each of three dimensions.
        constants: compile-time parameters by name.
        options: Triton's own: num_warps, launch_pdl, ...
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        constants: Mapping[str, object],
        **options: object,
    ):
        self._kernel = kernel
        self._grid = grid
        self._by_name = {**constants, **options}
        self._in_order = [constants[name] for name in kernel.arg_names if name in constants]
        self._again: Callable[..., object] | None = None

    def __call__(self, *arguments: object) -> None:
        """Launch on the current stream."""
        if self._again is not None:
            self._again(*arguments, *self._in_order)
            return
        compiled = self._kernel[self._grid](*arguments, **self._by_name)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._again = compiled[self._grid]

    def bind(self, *arguments: object, at: int) -> Callable[[Tensor, int], None]:
        """A launch with all arguments fixed except one tensor and the number that comes last.

        Args:
            arguments: as for a launch, without the tensor and without the number that comes last.
            at: the tensor's place among them.

        Returns:
            The launch, given the tensor and the last number.
        """
        before, after = arguments[:at], arguments[at:]
        return lambda tensor, number: self(*before, tensor, *after, number)


class Launches:
    """All launches of one kernel: a `Launch` for each binary and grid, found by one lookup.

    Args:
        kernel: a `triton.jit` function, its compile-time parameters last.
        free: names of numbers that the kernel excludes from specialisation.
    """

    def __init__(self, kernel: Any, free: frozenset[str]):
        self._kernel = kernel
        self._is_free = [name in free for name in kernel.arg_names]
        self._found: dict[object, Launch] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
        **options: object,
    ) -> None:
        """Launch on the current stream, with the arguments before the compile-time parameters."""
        key = (
            grid,
            *constants.values(),
            *options.values(),
            *[
                None if is_free else _binary_of(given)
                for given, is_free in zip(arguments, self._is_free, strict=False)
            ],
        )
        launch = self._found.get(key)
        if launch is None:
            launch = self._found[key] = Launch(self._kernel, grid, constants, **options)
        launch(*arguments)


def _binary_of(given: object) -> object:
    """The part of an argument that selects a binary: a tensor's device, dtype and alignment."""
    if isinstance(given, Tensor):
        return given.device, given.dtype, given.data_ptr() % 16 == 0
    return given


@cache
def starts_early(device: torch.device) -> bool:
    """True if a kernel may start while the one before it still finishes.

    Programmatic dependent launch, from Hopper on: the kernel then waits (`gdc_wait`) before it
    reads anything, but its start-up is already done.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
