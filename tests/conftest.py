"""What all tests share: GPU tests are skipped where there is no CUDA device."""

from functools import cache

import pytest


@cache
def cuda_is_available() -> bool:
    """Ask PyTorch, and only when a GPU test is about to run: importing it takes seconds."""
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not cuda_is_available():
        pytest.skip("needs a CUDA device")
