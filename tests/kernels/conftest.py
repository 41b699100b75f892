"""The kernels' tests work on tiny tensors: threads would only wait for each other."""

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_inputs import INTERPRETED


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    scope="module", params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
)
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run in this process: interpreted on the CPU, or on a GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def vllm_cache_write():
    """vLLM's CUDA write of one layer, from an installed vLLM or its unpacked library."""
    site = importlib.util.find_spec("vllm")
    if site is None or not site.submodule_search_locations:
        pytest.skip("vLLM is not here")
    folder = Path(next(iter(site.submodule_search_locations)))
    for library in sorted(folder.glob("_C*.so")):
        torch.ops.load_library(library)
    try:
        return torch.ops._C_cache_ops.reshape_and_cache_flash
    except AttributeError:
        pytest.skip("this vLLM has no CUDA kernels")
