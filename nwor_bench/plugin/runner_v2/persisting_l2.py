"""Keep a buffer in the part of a GPU's L2 cache that CUDA sets aside for persisting accesses.

Which accesses persist is an attribute of a stream: an address range, the access-policy window, of
which a share (`hit_ratio`) is kept and the rest streams through. Kernels captured in a CUDA graph
keep the attribute of the stream that they were captured on. Persisting is not guaranteed: an H200
kept no such line for as long as a window lasts (sweeps/studies/dram-kernels). L2 that is set
aside is missing for everything else, so it is given back whenever staging is off.

Source: CUDA C++ Programming Guide, "L2 cache control". Through NVIDIA's package cuda-bindings,
which PyTorch's CUDA wheels depend on.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("vllm.nwor_bench")


class L2Refusal(RuntimeError):
    """CUDA or this GPU refuses; the message names the call or the limit."""


@dataclass(frozen=True)
class L2Room:
    """What this GPU can keep of a buffer, in bytes."""

    buffer_bytes: int
    """Size of the buffer."""
    window_bytes: int
    """How much of it, from its start, the access-policy window covers."""
    set_aside_bytes: int
    """L2 set aside for it."""
    hit_ratio: float
    """Share of the window that is kept."""

    @classmethod
    def of(cls, buffer_bytes: int, most_set_aside: int, most_window: int) -> "L2Room":
        """The room for a buffer on a GPU that can set aside and cover so many bytes at most.

        Raises L2Refusal where one of the two is 0: this GPU keeps nothing.
        """
        if not most_set_aside or not most_window:
            raise L2Refusal("this GPU sets no L2 aside")
        window = min(buffer_bytes, most_window)
        set_aside = min(window, most_set_aside)
        return cls(buffer_bytes, window, set_aside, set_aside / window)


class PersistingL2:
    """Keeps one buffer in L2 while it is switched on.

    A refusal by CUDA switches it off for good: staging goes on without, and `facts` says why.

    Args:
        buffer: what to keep; its address must not change.
        cuda: the module `cuda.bindings.runtime`; by default it is imported here.
    """

    def __init__(self, buffer: Tensor, cuda: Any = None):
        self._buffer = buffer
        self._cuda = cuda
        self._device = buffer.device.index or 0
        self._covered: set[int] = set()
        self._limit_before: int | None = None
        self._is_on = False
        self.room: L2Room | None = None
        self.unavailable: str | None = None
        self._try(self._measure)

    def switch_on(self, *streams: torch.cuda.Stream) -> None:
        """Set L2 aside, and let these streams' accesses to the buffer persist.

        Other streams follow when they first stage (`cover_current_stream`).
        """
        if self._is_on or self.unavailable:
            return
        self._is_on = True
        self._try(self._set_aside)
        for stream in streams:
            self._cover(stream.cuda_stream)

    def switch_off(self) -> None:
        """Give the L2 back: nothing persists any more, on any stream."""
        if self._is_on:
            self._give_back()

    def cover_current_stream(self) -> None:
        """Let accesses of what is launched next persist; nothing while switched off."""
        if self._is_on:
            self._cover(torch.cuda.current_stream(self._buffer.device).cuda_stream)

    def facts(self) -> dict[str, Any]:
        """For run.json: sizes in bytes and the share kept, None if unknown; why it is not on."""
        unknown = {field.name: None for field in fields(L2Room)}
        room = asdict(self.room) if self.room else unknown
        return {**room, "unavailable": self.unavailable}

    def _cover(self, stream: int) -> None:
        if self._is_on and stream not in self._covered:
            self._try(partial(self._set_window, stream, persists=True))
            if self._is_on:
                self._covered.add(stream)

    def _measure(self) -> None:
        cuda = self._cuda = self._cuda or _import_cuda()
        self._call("cudaSetDevice", self._device)
        names = ("cudaDevAttrMaxPersistingL2CacheSize", "cudaDevAttrMaxAccessPolicyWindowSize")
        most = [
            self._call("cudaDeviceGetAttribute", getattr(cuda.cudaDeviceAttr, name), self._device)
            for name in names
        ]
        self.room = L2Room.of(self._buffer.numel() * self._buffer.element_size(), *most)

    def _set_aside(self) -> None:
        assert self.room is not None
        limit = self._cuda.cudaLimit.cudaLimitPersistingL2CacheSize
        before = self._call("cudaDeviceGetLimit", limit)
        self._call("cudaDeviceSetLimit", limit, self.room.set_aside_bytes)
        self._limit_before = before
        # The driver rounds what it is asked for.
        given = self._call("cudaDeviceGetLimit", limit)
        window = self.room.window_bytes
        ratio = min(1.0, given / window)
        self.room = L2Room(self.room.buffer_bytes, window, given, ratio)
        if not given:
            raise L2Refusal("CUDA set no L2 aside")

    def _give_back(self) -> None:
        """Undo everything; a refused call does not stop the others."""
        self._is_on = False
        covered, self._covered = self._covered, set()
        for stream in covered:
            self._try(partial(self._set_window, stream, persists=False))
        before, self._limit_before = self._limit_before, None
        if before is not None:
            limit = self._cuda.cudaLimit.cudaLimitPersistingL2CacheSize
            self._try(partial(self._call, "cudaCtxResetPersistingL2Cache"))
            self._try(partial(self._call, "cudaDeviceSetLimit", limit, before))

    def _set_window(self, stream: int, persists: bool) -> None:
        """Give a stream its access-policy window, or (of no bytes) take it away."""
        assert self.room is not None
        cuda, kinds = self._cuda, self._cuda.cudaAccessProperty
        value = cuda.cudaStreamAttrValue()
        window = value.accessPolicyWindow
        window.base_ptr = self._buffer.data_ptr()
        window.num_bytes = self.room.window_bytes if persists else 0
        window.hitRatio = self.room.hit_ratio if persists else 0.0
        kept = kinds.cudaAccessPropertyPersisting if persists else kinds.cudaAccessPropertyNormal
        window.hitProp = kept
        missed = kinds.cudaAccessPropertyStreaming if persists else kinds.cudaAccessPropertyNormal
        window.missProp = missed
        attribute = cuda.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow
        self._call("cudaStreamSetAttribute", stream, attribute, value)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call CUDA's runtime and return its result; an error is raised as L2Refusal."""
        error, *returned = getattr(self._cuda, name)(*arguments)
        if error != self._cuda.cudaError_t.cudaSuccess:
            self._cuda.cudaGetLastError()  # or the next launch would be blamed for it
            raise L2Refusal(f"{name}: {error.name}")
        return returned[0] if returned else None

    def _try(self, action: Callable[[], Any]) -> None:
        """Run an action; a refusal is logged, the first is kept, and all L2 is given back."""
        try:
            action()
        except L2Refusal as refusal:
            logger.warning("nwor: staged K/V do not persist in L2: %s", refusal)
            if self.unavailable is None:
                self.unavailable = str(refusal)
                self._give_back()


def _import_cuda() -> Any:
    try:
        from cuda.bindings import runtime
    except (ImportError, OSError) as error:
        raise L2Refusal(f"the package cuda-bindings does not load ({error})") from error
    return runtime
