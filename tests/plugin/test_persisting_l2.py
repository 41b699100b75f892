"""What is asked of CUDA to keep a buffer in L2, and given back, on a stand-in for its runtime.

The stand-in knows the calls' order and can refuse each of them; whether L2 then keeps anything
only a GPU's counters can tell.
"""

from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.runner_v2 import persisting_l2
from nwor_bench.plugin.runner_v2.persisting_l2 import L2Refusal, L2Room, PersistingL2

MB = 1 << 20
BUFFER = torch.zeros(MB, dtype=torch.float32)  # 4 MB


class Errors(IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815


class Properties(IntEnum):
    cudaAccessPropertyNormal = 0  # noqa: N815
    cudaAccessPropertyStreaming = 1  # noqa: N815
    cudaAccessPropertyPersisting = 2  # noqa: N815


@dataclass
class Cuda:
    """A device's state as the runtime changes it."""

    most_set_aside: int = 32 * MB
    most_window: int = 128 * MB
    rounding: int = MB
    refuses: str = "nothing"
    limit: int = 0
    resets: int = 0
    last_error: int = 0

    def __post_init__(self) -> None:
        self.windows: dict[int, dict[str, Any]] = {}
        self.cudaError_t = Errors
        self.cudaAccessProperty = Properties
        self.cudaDeviceAttr = SimpleNamespace(
            cudaDevAttrMaxPersistingL2CacheSize="set aside",
            cudaDevAttrMaxAccessPolicyWindowSize="window",
        )
        self.cudaLimit = SimpleNamespace(cudaLimitPersistingL2CacheSize="persisting")
        self.cudaStreamAttrID = SimpleNamespace(cudaLaunchAttributeAccessPolicyWindow="policy")

    def answer(self, name: str, *values: Any) -> tuple[Any, ...]:
        if self.refuses != name:
            return (Errors.cudaSuccess, *values)
        self.last_error = 1
        return (Errors.cudaErrorInvalidValue, *(None for _ in values))

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:  # noqa: N802
        assert device == 0
        return self.answer("cudaSetDevice")

    def cudaDeviceGetAttribute(self, which: str, device: int) -> tuple[Any, ...]:  # noqa: N802
        most = {"set aside": self.most_set_aside, "window": self.most_window}[which]
        return self.answer("cudaDeviceGetAttribute", most)

    def cudaDeviceGetLimit(self, which: str) -> tuple[Any, ...]:  # noqa: N802
        assert which == "persisting"
        return self.answer("cudaDeviceGetLimit", self.limit)

    def cudaDeviceSetLimit(self, which: str, size: int) -> tuple[Any, ...]:  # noqa: N802
        assert which == "persisting"
        if self.refuses != "cudaDeviceSetLimit":
            self.limit = -(-size // self.rounding) * self.rounding
        return self.answer("cudaDeviceSetLimit")

    def cudaStreamAttrValue(self) -> Any:  # noqa: N802
        return SimpleNamespace(accessPolicyWindow=SimpleNamespace())

    def cudaStreamSetAttribute(self, stream: int, which: str, value: Any) -> tuple[Any, ...]:  # noqa: N802
        assert which == "policy"
        answer = self.answer("cudaStreamSetAttribute")
        if answer[0] is Errors.cudaSuccess:
            self.windows[stream] = vars(value.accessPolicyWindow)
        return answer

    def cudaCtxResetPersistingL2Cache(self) -> tuple[Any, ...]:  # noqa: N802
        self.resets += 1
        return self.answer("cudaCtxResetPersistingL2Cache")

    def cudaGetLastError(self) -> tuple[Any, ...]:  # noqa: N802
        error, self.last_error = self.last_error, 0
        return (error,)

    def covered(self) -> set[int]:
        return {stream for stream, window in self.windows.items() if window["num_bytes"]}

    def is_as_found(self) -> bool:
        """Nothing set aside, no stream with a window, no error left for the next launch."""
        return not (self.limit or self.covered() or self.last_error)


def stream(handle: int) -> Any:
    return SimpleNamespace(cuda_stream=handle)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The handle of the current stream, to be changed by the test."""
    handle = [7]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream(handle[0]))
    return handle


def test_a_buffer_that_fits_is_kept_whole_on_every_stream_that_stages(current):
    cuda = Cuda()
    l2 = PersistingL2(BUFFER, cuda)
    l2.cover_current_stream()
    assert cuda.windows == {}  # not before it is switched on
    l2.switch_on(stream(7), stream(8))
    assert cuda.limit == 4 * MB
    current[0] = 9
    l2.cover_current_stream()
    assert cuda.covered() == {7, 8, 9}
    for window in cuda.windows.values():
        assert window == {
            "base_ptr": BUFFER.data_ptr(),
            "num_bytes": 4 * MB,
            "hitRatio": 1.0,
            "hitProp": Properties.cudaAccessPropertyPersisting,
            "missProp": Properties.cudaAccessPropertyStreaming,
        }
    assert l2.facts() == {
        "buffer_bytes": 4 * MB,
        "window_bytes": 4 * MB,
        "set_aside_bytes": 4 * MB,
        "hit_ratio": 1.0,
        "unavailable": None,
    }


def test_switching_off_gives_everything_back_and_on_takes_it_again(current):
    cuda = Cuda(limit=2 * MB)  # as somebody else left it
    l2 = PersistingL2(BUFFER, cuda)
    for times in (1, 2):
        l2.switch_on(stream(7))
        l2.switch_on(stream(7))
        assert (cuda.limit, cuda.covered()) == (4 * MB, {7})
        l2.switch_off()
        l2.switch_off()
        assert (cuda.limit, cuda.covered(), cuda.resets) == (2 * MB, set(), times)
        l2.cover_current_stream()
        assert cuda.covered() == set()


def test_a_buffer_too_large_is_kept_in_part():
    cuda = Cuda(most_set_aside=2 * MB, most_window=3 * MB)
    l2 = PersistingL2(BUFFER, cuda)
    l2.switch_on(stream(7))
    assert cuda.windows[7]["num_bytes"] == 3 * MB
    assert cuda.windows[7]["hitRatio"] == pytest.approx(2 / 3)
    assert l2.facts()["hit_ratio"] == pytest.approx(2 / 3)
    assert l2.facts()["buffer_bytes"] == 4 * MB


def test_the_share_is_that_of_what_the_driver_gave():
    cuda = Cuda()
    cuda.cudaDeviceSetLimit = lambda which, size: (setattr(cuda, "limit", MB), cuda.answer(""))[1]
    l2 = PersistingL2(BUFFER, cuda)
    l2.switch_on(stream(7))
    assert (l2.facts()["set_aside_bytes"], cuda.windows[7]["hitRatio"]) == (MB, 0.25)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9))
def test_what_is_kept_never_exceeds_what_is_set_aside(buffer, most_set_aside, most_window):
    room = L2Room.of(buffer, most_set_aside, most_window)
    assert room.window_bytes <= min(buffer, most_window)
    assert room.set_aside_bytes <= most_set_aside
    assert 0 < room.hit_ratio <= 1
    assert room.hit_ratio * room.window_bytes == pytest.approx(room.set_aside_bytes)
    if buffer <= min(most_set_aside, most_window):
        assert (room.window_bytes, room.hit_ratio) == (buffer, 1.0)


@pytest.mark.parametrize(
    "refused",
    [
        "cudaSetDevice",
        "cudaDeviceGetAttribute",
        "cudaDeviceGetLimit",
        "cudaDeviceSetLimit",
        "cudaStreamSetAttribute",
    ],
)
def test_a_refusal_is_told_once_and_staging_goes_on_without(refused, current, caplog):
    cuda = Cuda(refuses=refused)
    l2 = PersistingL2(BUFFER, cuda)
    for _ in range(2):
        l2.switch_on(stream(7), stream(8))
        l2.cover_current_stream()
        l2.switch_off()
    assert l2.facts()["unavailable"] == f"{refused}: cudaErrorInvalidValue"
    assert cuda.is_as_found()
    assert len(caplog.records) == 1
    assert refused in caplog.records[0].getMessage()


def test_what_cannot_be_given_back_keeps_nothing_else_back(caplog):
    cuda = Cuda()
    l2 = PersistingL2(BUFFER, cuda)
    l2.switch_on(stream(7), stream(8))
    cuda.refuses = "cudaCtxResetPersistingL2Cache"
    l2.switch_off()
    assert cuda.is_as_found()
    assert l2.facts()["unavailable"] == "cudaCtxResetPersistingL2Cache: cudaErrorInvalidValue"


def test_a_gpu_that_sets_nothing_aside():
    l2 = PersistingL2(BUFFER, Cuda(most_set_aside=0))
    l2.switch_on(stream(7))
    assert l2.facts() == {
        "buffer_bytes": None,
        "window_bytes": None,
        "set_aside_bytes": None,
        "hit_ratio": None,
        "unavailable": "this GPU sets no L2 aside",
    }


def test_without_the_package_the_reason_names_it(monkeypatch):
    def missing() -> Any:
        raise L2Refusal("the package cuda-bindings does not load (No module named 'cuda')")

    monkeypatch.setattr(persisting_l2, "_import_cuda", missing)
    assert "cuda-bindings" in PersistingL2(BUFFER).facts()["unavailable"]


def test_nvidias_package_knows_all_that_is_used_of_it(current):
    """Its own types and names, with the calls alone replaced: there is no driver here."""
    real = pytest.importorskip("cuda.bindings.runtime")
    calls = Cuda()
    found: dict[int, Any] = {}

    def set_attribute(handle: int, which: Any, value: Any) -> tuple[Any]:
        assert which == real.cudaStreamAttrID(1)
        found[handle] = value.accessPolicyWindow
        return (real.cudaError_t.cudaSuccess,)

    class Mixed:
        def __getattr__(self, name: str) -> Any:
            own = {
                "cudaSetDevice": lambda device: (real.cudaError_t(0),),
                "cudaDeviceGetAttribute": lambda which, device: (
                    real.cudaError_t(0),
                    {108: 32 * MB, 109: 2 * MB}[int(which)],
                ),
                "cudaDeviceGetLimit": lambda which: (real.cudaError_t(0), calls.limit),
                "cudaDeviceSetLimit": lambda which, size: (
                    setattr(calls, "limit", size),
                    (real.cudaError_t(0),),
                )[1],
                "cudaStreamSetAttribute": set_attribute,
            }
            return own.get(name) or getattr(real, name)

    l2 = PersistingL2(BUFFER, Mixed())
    l2.switch_on(stream(7))
    assert l2.facts()["unavailable"] is None
    window = found[7]
    assert (window.base_ptr, window.num_bytes, window.hitRatio) == (BUFFER.data_ptr(), 2 * MB, 1.0)
    assert window.hitProp == real.cudaAccessProperty.cudaAccessPropertyPersisting
    assert window.missProp == real.cudaAccessProperty.cudaAccessPropertyStreaming
    assert hasattr(real, "cudaCtxResetPersistingL2Cache")
    assert hasattr(real, "cudaGetLastError")
