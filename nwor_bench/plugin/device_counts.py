"""Counts of many steps on their way from the device to the host, and what commits say they wrote.

Counts come in one copy, with the sum of rows that commits wrote so far. If the sum is what was
accepted, so is each window's. If not, the oldest windows get what was written, the last one the
excess: committed tokens are then not the accepted ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nwor_bench.plugin.step import Step, accepted_of, has_passed


def read_all(counts: Sequence[Tensor | None], also: Tensor | None) -> list[list[int]]:
    """Every step's counts as host lists, and `also` as one more if anything is copied; waits."""
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
    """None if there was nothing to wait for."""

    def is_there(self) -> bool:
        """True if `lists` would not wait."""
        return self._copied is None or has_passed(self._copied)

    def lists(self) -> list[list[int]]:
        """As `read_all` returns them; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return _split([] if self._on_host is None else self._on_host.tolist(), self._wanted)


class SideReader:
    """Copies on a stream that waits for no step in flight: only for tensors that are final."""

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


class WrittenRows:
    """Rows that the commits of each reading wrote.

    Args:
        before: rows written in each layer so far, modulo 2**32.
    """

    def __init__(self, before: Sequence[int]):
        self._before = before

    def settle(
        self, steps: Sequence[Step], num_sampled: Sequence[list[int]], now: Sequence[int]
    ) -> None:
        """Set how many drafts the commit of each step of a reading wrote.

        Args:
            steps: in their order.
            num_sampled: tokens that each request of each step got.
            now: rows written in each layer up to the last step, modulo 2**32.
        """
        pairs = zip(steps, num_sampled, strict=True)
        committed = [
            (step, *_rows_due(step, counts)) for step, counts in pairs if step.certain is not None
        ]
        if not committed:
            return  # rows that nobody committed are found in the next reading with a commit
        wrote = [(new - old) % 2**32 for new, old in zip(now, self._before, strict=True)]
        self._before = now
        left = in_every_layer(wrote, sum(due for _, due, _ in committed))
        for step, due, certain in committed:
            rows = min(due, left)
            left -= rows
            step.committed_tokens = max(rows - certain, 0)
        step.committed_tokens = (step.committed_tokens or 0) + left


def in_every_layer(wrote: Sequence[int], due: int) -> int:
    """One number for all layers: the least if a layer lacks rows, else the most."""
    least = min(wrote)
    return least if least < due else max(wrote)


def _rows_due(step: Step, num_sampled: list[int]) -> tuple[int, int]:
    """Rows that the step's commit had to write in each layer; how many of them are certain."""
    sampled, certain, drafts = np.array(num_sampled, dtype=np.int64), step.certain, step.drafts
    assert certain is not None
    assert drafts is not None
    accepted = accepted_of(drafts, num_sampled)
    rows = accepted + certain
    if step.decided_in_commit:
        rows = np.clip(sampled + certain - 1, 0, drafts + certain)
    return int(rows.sum()), int((rows - accepted).sum())
