"""Rows of requests, kept under a name and compared by name: K/V rows, or recurrent states."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_bench.errors import BenchError
from nwor_bench.plugin.observe.errors import RowErrors, RowPlaces

KeptPair = tuple[int, str, int, int]
"""(request of this set, other set, its request there, length of its prompt)."""


class RowPart(NamedTuple):
    """What is compared of one kept tensor."""

    tensor: int
    """The tensor's place in `KeptRows.tensors`."""
    labels: Mapping[str, Any]
    """`layer`, `name` and `what`, for the errors."""
    columns: slice = slice(None)
    cache_dtype: str = "auto"


@dataclass(frozen=True)
class KeptRows:
    """Rows of some requests, one after the other."""

    spans: Sequence[tuple[int, int]]
    """First position and the one behind the last, of each request."""
    known: Tensor
    """[rows] bool: False if the contents were lost because another request got the block."""
    tensors: Sequence[Tensor]
    """[rows, heads, width] each."""
    device: torch.device
    """Where they are compared; they may be kept on the host."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Each request's first row."""
        return (0, *accumulate(stop - start for start, stop in self.spans))

    def rows_of(self, request: int, positions: Tensor) -> Tensor:
        """Rows of these positions of a request."""
        return positions - self.spans[request][0] + self.offsets[request]


class RowStore:
    """Kept rows by name."""

    def __init__(self, parts: Iterable[RowPart]):
        self._parts = list(parts)
        self._kept: dict[str, KeptRows] = {}

    def drop(self, names: Sequence[str] | None) -> None:
        """Forget kept rows; None: all of them."""
        for name in list(self._kept) if names is None else names:
            del self._kept[name]

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> dict[str, Any]:
        """Errors of kept rows against others of the same token ids, see `KvRows.compare`."""
        if name not in self._kept or any(pair[1] not in self._kept for pair in pairs):
            raise BenchError.at(
                "K/V rows", f"{name!r} is compared with rows that are not kept", name
            )
        places, sets, unknown = self._matched(name, pairs)
        checked = places.requests.numel()
        errors = RowErrors(places)
        for part in self._parts if checked else ():
            ours, *theirs = (self._rows(part, *entry) for entry in sets)
            errors.add(part.labels, ours, torch.cat(theirs), part.cache_dtype)
        return {"checked": checked, "unknown": unknown, "errors": errors.read()}

    def _rows(self, part: RowPart, name: str, index: Tensor) -> Tensor:
        kept = self._kept[name]
        return kept.tensors[part.tensor][..., part.columns][index].to(kept.device)

    def _matched(
        self, name: str, pairs: Sequence[KeptPair]
    ) -> tuple[RowPlaces, list[tuple[str, Tensor]], int]:
        """Places of the rows that both sets know, their indices by set (ours first), and how many
        positions are in both of which one has lost the contents."""
        mine = self._kept[name]
        ours, theirs, requests, positions, outputs = [], [], [], [], []
        unknown = 0
        for i, other_name, j, prompt_length in pairs:
            other = self._kept[other_name]
            start = max(mine.spans[i][0], other.spans[j][0])
            stop = min(mine.spans[i][1], other.spans[j][1])
            position = torch.arange(start, max(start, stop))
            row, other_row = mine.rows_of(i, position), other.rows_of(j, position)
            known = mine.known[row] & other.known[other_row]
            unknown += int((~known).sum())
            ours.append(row[known])
            theirs.append((other_name, other_row[known]))
            positions.append(position[known])
            requests.append(torch.full_like(position[known], i))
            outputs.append(position[known] >= prompt_length)
        empty = torch.empty(0, dtype=torch.int64)
        places = RowPlaces(
            torch.cat([empty, *requests]),
            torch.cat([empty, *positions]),
            torch.cat([empty.bool(), *outputs]),
        )
        # Each set's indices go to the device of its rows: once, not for each tensor.
        sets = [(name, torch.cat([empty, *ours])), *theirs]
        there = [(set_name, at.to(self._kept[set_name].tensors[0].device)) for set_name, at in sets]
        return places, there, unknown
