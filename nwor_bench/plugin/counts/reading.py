"""Counts of many steps on their way from the device to the host, in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_bench.plugin.observe.device_times import has_passed


def read_all(counts: Sequence[Tensor | None], also: Tensor | None) -> list[list[int]]:
    """Every step's counts as host lists; waits for the device.

    If anything is copied, `also` is copied with it and returned as one more list.
    """
    wanted = _with(counts, also)
    there = [tensor for tensor in wanted if tensor is not None]
    return _split(torch.cat(there).tolist() if there else [], wanted)


@dataclass
class Coming:
    """A copy that the device may still be making."""

    _wanted: Sequence[Tensor | None]
    _on_device: Tensor | None
    """Kept until it has been read."""
    _on_host: Tensor | None
    _copied: torch.cuda.Event | None
    """None where there was nothing to wait for."""

    def is_there(self) -> bool:
        """True if `lists` would not wait."""
        return self._copied is None or has_passed(self._copied)

    def lists(self) -> list[list[int]]:
        """What `read_all` returns; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return _split([] if self._on_host is None else self._on_host.tolist(), self._wanted)


class SideReader:
    """Begins copies on a stream of its own, which waits for no step that is in flight.

    So only tensors may be copied that the device has finished writing.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, counts: Sequence[Tensor | None], also: Tensor | None) -> Coming:
        """Begin to copy every step's counts, and `also` as `read_all` does."""
        wanted = _with(counts, also)
        there = [tensor for tensor in wanted if tensor is not None]
        if not there or there[0].device.type != "cuda":
            return Coming(wanted, None, torch.cat(there) if there else None, None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(there[0].device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            flat = torch.cat(there)
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return Coming(wanted, flat, host, copied)


def _with(counts: Sequence[Tensor | None], also: Tensor | None) -> list[Tensor | None]:
    if also is None or all(tensor is None for tensor in counts):
        return list(counts)
    return [*counts, also]


def _split(flat: list[int], counts: Sequence[Tensor | None]) -> list[list[int]]:
    lists: list[list[int]] = []
    start = 0
    for tensor in counts:
        end = start + (0 if tensor is None else tensor.numel())
        lists.append(flat[start:end])
        start = end
    return lists
