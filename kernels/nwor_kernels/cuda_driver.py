"""The few calls of the CUDA driver that are made directly, as ctypes wants them."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from functools import cache

PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION of cuda.h."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: a value of 64 bytes, of which only an int is needed here."""

    _fields_ = (("id", c_int), ("pad", c_ubyte * 4), ("value", c_int), ("rest", c_ubyte * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


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


def parameter_places(driver: ctypes.CDLL, function: int, most: int) -> list[tuple[int, int]]:
    """(Offset, bytes) of each parameter of a CUfunction, up to `most` of them."""
    offset, size = c_size_t(), c_size_t()
    places: list[tuple[int, int]] = []
    while len(places) < most:
        if driver.cuFuncGetParamInfo(function, len(places), byref(offset), byref(size)):
            break  # there is no such parameter
        places.append((offset.value, size.value))
    return places


def driver_error(driver: ctypes.CDLL, call: str, result: int) -> RuntimeError:
    """An error that names the CUresult of a call."""
    name = c_char_p()
    driver.cuGetErrorName(result, byref(name))
    known = name.value.decode() if name.value else "unknown to the driver"
    return RuntimeError(f"{call}: {known} ({result})")
