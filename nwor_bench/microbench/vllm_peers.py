"""vLLM's own kernels as peers. Of all microbenchmarks this module alone touches vLLM."""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nwor_bench.microbench.subject import not_installed, refused


@cache
def cuda_write() -> Callable[..., None]:
    """`reshape_and_cache_flash`, CUDA, as vLLM's FlashAttention backend calls it.

    Its library alone is loaded, so that an unpacked one is enough; a CPU build has none.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        raise not_installed("vLLM is not installed")
    for folder in found.submodule_search_locations or []:
        for library in sorted(Path(folder).glob("_C_stable_libtorch*.so")):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash.default
    except AttributeError as error:
        raise refused("this vLLM was built without CUDA kernels") from error


@cache
def triton_write() -> Callable[..., None]:
    """`triton_reshape_and_cache_flash`, the write of vLLM's Triton backend."""
    try:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
            triton_reshape_and_cache_flash,
        )
    except ImportError as error:
        raise not_installed(f"vLLM's Triton write does not import: {error}") from error
    return triton_reshape_and_cache_flash


@cache
def flash_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlashAttention's varlen function and the one that makes its scheduler's metadata."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import (
            flash_attn_varlen_func,
            get_scheduler_metadata,
        )
    except ImportError as error:
        raise not_installed(f"vLLM's FlashAttention does not import: {error}") from error
    return flash_attn_varlen_func, get_scheduler_metadata
