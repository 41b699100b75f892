"""Repeated launches of a Triton kernel: less host time, no gap after the kernel before."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nwor_kernels.direct_launch import (
    DirectLaunch,
    Refused,
    count_refusal,
    hooks_installed,
    prepare,
)


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
        self._compiled: Any = None
        self._again: Callable[..., object] | None = None

    def __call__(self, *arguments: object) -> None:
        """Launch on the current stream."""
        if self._again is not None:
            self._again(*arguments, *self._in_order)
            return
        compiled = self._kernel[self._grid](*arguments, **self._by_name)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled, self._again = compiled, compiled[self._grid]

    def bind(self, *arguments: object, at: int) -> Callable[[Tensor, int], None]:
        """A launch with all arguments fixed except one tensor's address and the last number.

        Args:
            arguments: as for a launch, without the tensor and without the number that comes last.
            at: the tensor's place among them.

        Returns:
            The launch, given the tensor and the last number (see `bind_last`).
        """
        before, after = arguments[:at], arguments[at:]
        places = at, len(arguments) + 1
        direct = _Direct(self)

        def launch(tensor: Tensor, number: int) -> None:
            if direct.launch is not None and not hooks_installed():
                direct.launch(tensor.data_ptr(), number)
            else:
                direct.by_triton((*before, tensor, *after, number), places)

        return launch

    def bind_last(self, *fixed: object) -> Callable[..., None]:
        """A launch with its first arguments fixed.

        The first launch goes through Triton, later ones to the driver (`direct_launch`), unless
        that is refused or a profiler has hooked Triton's launches. Fixed tensors are kept alive.

        Returns:
            The launch, given the other arguments: tensors, and one number that comes last.
        """
        direct = _Direct(self)

        def launch(*given: Any) -> None:
            if direct.launch is not None and not hooks_installed():
                *tensors, number = given
                direct.launch(*[tensor.data_ptr() for tensor in tensors], number)
            else:
                every = (*fixed, *given)
                direct.by_triton(every, range(len(fixed), len(every)))

        return launch


class _Direct:
    """The driver's launch of a `Launch`, once Triton has compiled it."""

    def __init__(self, of: Launch):
        self._of = of
        self._is_refused = False
        self.launch: DirectLaunch | None = None
        """None: launch through Triton."""

    def by_triton(self, arguments: tuple[Any, ...], places: Sequence[int]) -> None:
        """Launch through Triton, and the next time directly: all the same except `places`."""
        self._of(*arguments)
        if self.launch is not None or self._is_refused or self._of._compiled is None:
            return
        raw = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        try:
            self.launch = prepare(self._of._compiled, self._of._grid, raw, places)
        except Exception as fault:  # the launch above was made: its caller must not make it again
            count_refusal(str(fault) if isinstance(fault, Refused) else type(fault).__name__)
            self._is_refused = True


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
    """Whether a kernel may start while the one before it still finishes.

    Programmatic dependent launch, from Hopper on: the kernel then waits (`gdc_wait`) before it
    reads anything, but its start-up is already done.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
