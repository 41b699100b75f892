"""A compiled kernel and its jit function as Triton would make them, for driver_stand_in.c."""

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_ulonglong
from types import SimpleNamespace
from typing import Any

DEVICE, STREAM = 3, 0x7F00_1234_5678
SIGNATURE = {
    **{"table": "*i64", "counts": "*i32", "absent": "constexpr", "flags": "*i1"},
    **{"size": "i64", "small": "u8", "number": "i32", "CONSTANT": "constexpr"},
}
SIZES = [8, 8, 8, 8, 1, 4, 8, 8]
"""Of the parameters: all but the constexprs, and two scratch pointers."""
COUNTS = 1
"""Place of the address that differs."""
PLACES = (COUNTS, 6)
"""Places of what differs: that address, and the last number."""


class Function(ctypes.Structure):
    _fields_ = (("count", c_size_t), ("offsets", c_size_t * 16), ("sizes", c_size_t * 16))


class Record(ctypes.Structure):
    _fields_ = (
        ("launches", c_uint),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("num_attributes", c_uint),
        ("attribute", c_int),
        ("attribute_value", c_int),
        ("answer", c_int),
        ("stream", c_ulonglong),
        ("parameters", c_ulonglong * 16),
    )


def function_of(sizes: list[int]) -> Function:
    """A kernel's parameters laid out as C would."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // size) * size)
        end = offsets[-1] + size
    return Function(len(sizes), (c_size_t * 16)(*offsets), (c_size_t * 16)(*sizes))


class StandInKernel:
    """A compiled kernel, with the handle of a stand-in function; counts launches by Triton."""

    def __init__(self, function: Function | None = None, signature: Any = SIGNATURE, **other: Any):
        self.layout = function or function_of(SIZES)
        self.function = ctypes.addressof(self.layout)
        self.src = SimpleNamespace(signature=signature)
        facts = {
            **{"num_warps": 4, "num_ctas": 1, "shared": 48, "launch_pdl": True},
            **{"global_scratch_size": 0, "profile_scratch_size": 0, "tensordesc_meta": []},
            "launch_cooperative_grid": False,
            "target": SimpleNamespace(backend="cuda", arch=90, warp_size=32),
        }
        self.metadata = SimpleNamespace(**{**facts, **other})
        self.by_triton: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.by_triton.append((grid, *arguments))


class StandInJit:
    """A `triton.jit` function of SIGNATURE; counts its launches."""

    arg_names = tuple(SIGNATURE)

    def __init__(self, kernel: StandInKernel | None):
        self.kernel = kernel
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **by_name: Any) -> StandInKernel | None:
            self.launches.append((grid, *arguments, by_name))
            return self.kernel

        return run
