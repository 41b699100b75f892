"""The kernels' tests work on tiny tensors: threads would only wait for each other."""

import importlib.util
from pathlib import Path

import pytest
import torch
from kernel_inputs import IN_TRITON


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[IN_TRITON])
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """For what Triton's implementation alone does."""
    return request.param


@pytest.fixture(scope="module", params=[pytest.param(None, id="reference"), IN_TRITON])
def on_triton(request: pytest.FixtureRequest) -> torch.device | None:
    """For what both implementations do: None asks for the reference, a device for Triton's."""
    return request.param


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
