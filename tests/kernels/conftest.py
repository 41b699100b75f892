"""The kernels' tests work on tiny tensors: threads would only wait for each other."""

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from driver_stand_in import DEVICE, STREAM, Record
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


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """driver_stand_in.c, built against CUDA's header as Triton ships it."""
    triton = importlib.util.find_spec("triton")
    compiler = shutil.which("cc")
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("needs a C compiler and Triton")
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    if not (include / "cuda.h").exists():
        pytest.skip("needs CUDA's header")
    library = tmp_path_factory.mktemp("driver") / "libcuda_stand_in.so"
    source = Path(__file__).with_name("driver_stand_in.c")
    options = ["-shared", "-fPIC", "-Wall", "-Werror", f"-I{include}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture
def streams() -> dict[int, int]:
    """The current stream of each stand-in device."""
    return {DEVICE: STREAM}


@pytest.fixture
def record(
    driver_library: Path, streams: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Record]:
    """What the stand-in for the driver was given last; nothing yet."""
    from nwor_kernels.direct_launch import load_driver, refusals

    load_driver.cache_clear()
    real = ctypes.CDLL
    opened = {"libcuda.so.1": str(driver_library)}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: real(opened[name]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.get, raising=False)
    refusals.clear()
    found = Record.in_dll(real(str(driver_library)), "record")
    ctypes.memset(ctypes.addressof(found), 0, ctypes.sizeof(found))
    yield found
    load_driver.cache_clear()
