"""Launches a compiled Triton kernel through the CUDA driver: the least host time of all.

Triton unpacks every argument in every launch. Here parameters, grid and attributes stay in the
memory that `cuLaunchKernelEx` reads, and a launch writes one address and one number. A binary's
signature is checked against the driver's own description; anything unexpected is refused, with a
reason that is logged once and counted in `refusals`.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from functools import cache, partial
from struct import Struct
from typing import Any

import torch
from triton import knobs

logger = logging.getLogger("nwor_kernels")

refusals: Counter[str] = Counter()
"""Kernels that are launched in Triton's way, by reason."""

DirectLaunch = Callable[..., None]
"""Launches on the current stream, given the addresses and numbers that differ."""

MOST_SHARED_MEMORY = 227 * 1024
"""Bytes of a block; beyond it newer Tritons add an attribute."""

_SCRATCH = ("*global_scratch", "*profile_scratch")
"""Pointers that Triton appends to the arguments; null if the kernel needs no such memory."""

_FORMATS = {
    **{"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"},
    **{"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
}
"""How the driver wants integers, as `struct` writes them; no kernel here takes other numbers."""


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h."""


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a value of 64 bytes, only an int of it is needed here."""

    _fields_ = (("id", c_int), ("pad", c_ubyte * 4), ("value", c_int), ("rest", c_ubyte * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint),
    )


class Refused(Exception):
    """This kernel cannot be launched directly; the text says why."""


def prepare(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], places: Sequence[int]
) -> DirectLaunch:
    """The direct launch of this binary, for one thread at a time.

    Args:
        compiled: Triton's `CompiledKernel`, launched at least once.
        grid: programs in each of three dimensions.
        arguments: the kernel's arguments before its compile-time parameters: addresses, integers
            and None. Whatever the addresses point to must be kept alive.
        places: which of them differ: addresses or integers, in ascending order.

    Raises:
        Refused: with a reason. What is returned raises RuntimeError, with the driver's name of
            the error, if a launch fails.
    """
    try:
        _check_binary(compiled, grid)
        driver = load_driver()
    except (AttributeError, OSError) as missing:  # of another Triton, or of the driver
        raise Refused(f"missing: {missing}") from missing
    kinds = list(compiled.src.signature.values())[: len(arguments)]
    passed = [place for place, kind in enumerate(kinds) if kind != "constexpr"]
    if not set(places) <= set(passed):
        raise Refused("layout: an argument that differs is compiled in")
    formats = [_format_of(kind) for kind in (*(kinds[place] for place in passed), *_SCRATCH)]
    offsets, size = _layout(driver, compiled.function, formats)
    block = ctypes.create_string_buffer(size)
    of_place = dict(zip(passed, zip(formats, offsets, strict=False), strict=False))
    for place, (form, offset) in of_place.items():
        Struct(form).pack_into(block, offset, arguments[place] or 0)
    setters: list[Callable[..., None]] = [
        partial(Struct(form).pack_into, block, offset)
        for form, offset in map(of_place.__getitem__, places)
    ]
    if list(places) == passed[-len(places) :]:  # side by side: written at once
        setters = [_setter_of_all(block, [of_place[place] for place in places])]
    start = ctypes.addressof(block)
    parameters = (c_void_p * len(offsets))(*[start + offset for offset in offsets])
    return _launch_by(driver, compiled, _config(compiled.metadata, grid), parameters, setters)


def _setter_of_all(block: Any, fields: Sequence[tuple[str, int]]) -> Callable[..., None]:
    """Writes values side by side, given the format and offset of each."""
    first = end = fields[0][1]
    form = "="
    for each, offset in fields:
        form += "x" * (offset - end) + each
        end = offset + Struct(each).size
    return partial(Struct(form).pack_into, block, first)


def _launch_by(
    driver: ctypes.CDLL,
    compiled: Any,
    config: _LaunchConfig,
    parameters: Any,
    setters: Sequence[Callable[..., None]],
) -> DirectLaunch:
    device = torch.cuda.current_device()
    stream_of, driver_launch = torch._C._cuda_getCurrentRawStream, driver.cuLaunchKernelEx
    config_at, parameters_at, function = map(
        c_void_p, (ctypes.addressof(config), ctypes.addressof(parameters), compiled.function)
    )
    held = compiled, parameters  # newer Tritons unload a binary without references

    def start() -> None:
        config.stream = stream_of(device)
        result = driver_launch(config_at, function, parameters_at, None)
        if result:
            raise _driver_error(driver, "cuLaunchKernelEx", result)

    if len(setters) == 1:
        set_all = setters[0]

        def launch(*values: int, held: object = held) -> None:
            set_all(*values)
            start()

        return launch

    def launch_each(*values: int, held: object = held) -> None:
        for set_one, value in zip(setters, values, strict=True):
            set_one(value)
        start()

    return launch_each


def _check_binary(compiled: Any, grid: tuple[int, int, int]) -> None:
    """Refuse a binary whose launch needs more than parameters, grid and early start."""
    metadata, kinds = compiled.metadata, compiled.src.signature.values()
    problems = {
        "backend": torch.version.hip is not None or metadata.target.backend != "cuda",
        "warp_size": metadata.target.warp_size != 32,
        "empty_grid": not all(grid),
        "scratch_memory": metadata.global_scratch_size > 0 or metadata.profile_scratch_size > 0,
        "clusters": metadata.num_ctas != 1 or max(getattr(metadata, "cluster_dims", (1,))) > 1,
        "cooperative_grid": metadata.launch_cooperative_grid,
        "shared_memory": metadata.shared > MOST_SHARED_MEMORY,
        "tensor_descriptors": getattr(metadata, "tensordesc_meta", None),
        "tuples": not all(isinstance(kind, str) for kind in kinds),
        "launch_hooks": hooks_installed(),
        "not_loaded": not compiled.function,
    }
    for reason, holds in problems.items():
        if holds:
            raise Refused(reason)


def hooks_installed() -> bool:
    """True if a profiler has hooked Triton's launches."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):  # a chain may be empty
            return True
    return False


def _format_of(kind: str) -> str:
    if kind.startswith("*"):
        return "Q"
    if kind not in _FORMATS:
        raise Refused(f"layout: an argument of type {kind}")
    return _FORMATS[kind]


def _layout(driver: ctypes.CDLL, function: int, formats: list[str]) -> tuple[list[int], int]:
    """(Offset of each parameter according to the driver, bytes of all); refuses another layout."""
    places, end = _parameter_places(driver, function, len(formats) + 1), 0
    expected = [Struct(form).size for form in formats]
    if [size for _, size in places] != expected:
        raise Refused(f"layout: parameters at {places}, not of {expected} bytes")
    for offset, size in places:
        if offset < end:
            raise Refused(f"layout: parameters overlap: {places}")
        end = offset + size
    return [offset for offset, _ in places], end


def _config(metadata: Any, grid: tuple[int, int, int]) -> _LaunchConfig:
    early = bool(metadata.launch_pdl)
    attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
    return _LaunchConfig(
        grid=(c_uint * 3)(*grid),
        block=(c_uint * 3)(32 * metadata.num_warps, 1, 1),
        shared_bytes=metadata.shared,
        attributes=ctypes.pointer(attribute) if early else None,
        num_attributes=int(early),
    )


def count_refusal(reason: str) -> None:
    """Note that a kernel is launched in Triton's way; the log hears of each reason once."""
    if not refusals[reason]:
        logger.warning("a kernel is launched through Triton, not directly: %s", reason)
    refusals[reason] += 1


@cache
def load_driver() -> ctypes.CDLL:
    """The CUDA driver's library.

    Raises:
        OSError: there is none.
        AttributeError: it is older than CUDA 12.4, which brought cuFuncGetParamInfo.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    driver.cuFuncGetParamInfo.argtypes = [c_void_p, c_size_t, c_void_p, c_void_p]
    driver.cuGetErrorName.argtypes = [c_int, c_void_p]
    return driver


def _parameter_places(driver: ctypes.CDLL, function: int, most: int) -> list[tuple[int, int]]:
    """(Offset, bytes) of each parameter of a CUfunction, up to `most` of them."""
    offset, size = c_size_t(), c_size_t()
    places: list[tuple[int, int]] = []
    while len(places) < most:
        if driver.cuFuncGetParamInfo(function, len(places), byref(offset), byref(size)):
            break  # there is no such parameter
        places.append((offset.value, size.value))
    return places


def _driver_error(driver: ctypes.CDLL, call: str, result: int) -> RuntimeError:
    """An error that names the CUresult of a call."""
    name = c_char_p()
    driver.cuGetErrorName(result, byref(name))
    known = name.value.decode() if name.value else "unknown to the driver"
    return RuntimeError(f"{call}: {known} ({result})")
