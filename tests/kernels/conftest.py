"""The kernels' tests work on tiny tensors: threads would only wait for each other."""

import os

import pytest
import torch

# Triton decides when a kernel is defined whether it is compiled or interpreted, so one process
# tests either; test_triton_interpreter.py starts the process that interprets.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    scope="module",
    params=["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)],
)
def triton_device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run in this process: interpreted on the CPU, or on a GPU."""
    return torch.device(request.param)
