"""K/V rows of finished requests, copied out of the cache under a name and compared by name.

Each KV-cache group gives a request blocks of its own, so each group's layers are read separately.
Rows of a block that another request is given before the batch ends are copied at that moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.errors import BenchError
from nwor_bench.plugin.layers import rows_of
from nwor_bench.plugin.observe.block_tables import BlockTables, BlockWatch, Held
from nwor_bench.plugin.observe.errors import RowErrors, RowPlaces
from nwor_bench.plugin.runner_hook import RunnerHook

Pair = tuple[int, str, int, int]
"""(request of this set, other set, its request there, length of its prompt)."""

ROOM = 8
"""Rows stay on a GPU that has this many times their size free, else they go to the host."""

RESCUE_BYTES = 1 << 30
"""Most bytes of rows that are copied before their blocks are reused; the rest is lost."""


@dataclass(frozen=True)
class LayerRows:
    """Where a target layer's rows are: its cache, and where V begins in a row.

    Of latent attention K is the latent, and V the rotary part.
    """

    number: int
    """Its place among the target layers."""
    name: str
    kv_cache: Any
    """[blocks, kv_heads, block_size, K + V width], not contiguous; recurrent layers have others."""
    head_dim: int
    cache_dtype: str


@dataclass(frozen=True)
class KeptRows:
    """Rows of some requests, one after the other, as they stood in the cache."""

    spans: tuple[tuple[int, int], ...]
    """First position and the one behind the last, of each request."""
    offsets: tuple[int, ...]
    """Each request's first row."""
    known: Tensor
    """[rows] bool: False if the contents were lost because another request got the block."""
    layers: tuple[Tensor, ...]
    """[rows, kv_heads, K + V width] for each target layer."""


class GroupRows:
    """K/V rows of the target layers in one KV-cache group, which all have them in the same blocks."""

    def __init__(self, tables: BlockTables, layers: Sequence[LayerRows]):
        self._tables = tables
        self._kept: dict[str, KeptRows] = {}
        self._rescued: dict[Held, list[Tensor]] = {}
        self._layers = layers

    def forget_rescued(self) -> None:
        """Forget what was copied before its block was reused: another batch begins."""
        self._rescued.clear()

    def why_unreadable(self) -> str | None:
        """Why the cache cannot be read row by row; None if it can be."""
        for layer in self._layers:
            if not isinstance(layer.kv_cache, Tensor) or layer.kv_cache.dim() != 4:
                return f"{layer.name} has no cache of blocks, heads, tokens and elements"
            dtype = layer.kv_cache.dtype
            plain = dtype.is_floating_point or layer.cache_dtype.startswith("fp8")
            if not plain or layer.kv_cache.element_size() > 4:
                return f"{layer.name} has a cache of type {layer.cache_dtype} ({dtype})"
        return None

    def keep(self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]]) -> int:
        """Copy the rows of these positions of these requests, one span a request; their bytes."""
        held = [
            each
            for request, (start, stop) in zip(requests, spans, strict=True)
            for each in self._tables.held(request, start, stop)
        ]
        offsets = [position for start, stop in spans for position in range(start, stop)]
        places = _places(held, offsets, self._tables)
        known = places >= 0
        num_bytes = len(held) * self._row_bytes()
        there = _place_for(num_bytes, self._layers[0].kv_cache.device)
        slots = places.to(self._layers[0].kv_cache.device)
        rows = [_gather(layer, slots).to(there) for layer in self._layers]
        for block, copies in self._rescued.items():
            index = [i for i, each in enumerate(held) if each == block]
            known[index] = True
            inside = [offsets[i] % self._tables.block_size for i in index]
            for layer_rows, copy in zip(rows, copies, strict=True):
                layer_rows[index] = copy[inside].to(there)
        spans = tuple((start, stop) for start, stop in spans)
        self._kept[name] = KeptRows(spans, _offsets(spans), known, tuple(rows))
        return num_bytes

    def rescue(self, lost: list[Held]) -> None:
        """Copy the rows of blocks that are about to be reused, as far as there is room."""
        size = self._tables.block_size
        for held in lost:
            if (len(self._rescued) + 1) * size * self._row_bytes() > RESCUE_BYTES:
                return
            slots = held[0] * size + torch.arange(size)
            self._rescued[held] = [_gather(layer, slots) for layer in self._layers]

    def _row_bytes(self) -> int:
        return sum(_row_bytes(layer.kv_cache) for layer in self._layers)

    def drop(self, names: Sequence[str] | None) -> None:
        """Forget kept rows; None: all of them."""
        for name in list(self._kept) if names is None else names:
            del self._kept[name]

    def compare(self, name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
        """As `KvRows.compare` does, for these layers."""
        if name not in self._kept or any(pair[1] not in self._kept for pair in pairs):
            raise BenchError.at(
                "K/V rows", f"{name!r} is compared with rows that are not kept", name
            )
        rows = _matched(self._kept, name, pairs)
        checked = rows.places.requests.numel()
        errors = RowErrors(rows.places)
        for number in range(len(self._layers) if checked else 0):
            self._add_errors(errors, number, name, rows)
        return {"checked": checked, "unknown": rows.unknown, "errors": errors.read()}

    def _add_errors(self, errors: RowErrors, number: int, name: str, rows: "_Matched") -> None:
        layer = self._layers[number]
        device = layer.kv_cache.device
        ours = self._kept[name].layers[number][rows.ours].to(device)
        theirs = torch.cat(
            [self._kept[other].layers[number][index].to(device) for other, index in rows.theirs]
        )
        split = layer.head_dim
        for what, columns in (("K", slice(0, split)), ("V", slice(split, None))):
            both = ours[..., columns].contiguous(), theirs[..., columns].contiguous()
            labels = {"layer": layer.number, "name": layer.name, "what": what}
            errors.add(labels, *both, layer.cache_dtype)


@dataclass(frozen=True)
class _Matched:
    ours: Tensor
    theirs: list[tuple[str, Tensor]]
    places: RowPlaces
    unknown: int


def _matched(kept: dict[str, KeptRows], name: str, pairs: Sequence[Pair]) -> _Matched:
    mine = kept[name]
    ours, theirs, requests, positions, outputs = [], [], [], [], []
    unknown = 0
    for i, other_name, j, prompt_length in pairs:
        other = kept[other_name]
        start = max(mine.spans[i][0], other.spans[j][0])
        stop = min(mine.spans[i][1], other.spans[j][1])
        position = torch.arange(start, max(start, stop))
        row = position - mine.spans[i][0] + mine.offsets[i]
        other_row = position - other.spans[j][0] + other.offsets[j]
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
    # Each set's indices go to the device of its rows: once, not for each layer.
    mine_at, *beside = (
        index.to(kept[other].layers[0].device)
        for other, index in ((name, torch.cat([empty, *ours])), *theirs)
    )
    others = [(other, index) for (other, _), index in zip(theirs, beside, strict=True)]
    return _Matched(mine_at, others, places, unknown)


def _places(held: Sequence[Held | None], positions: Sequence[int], tables: BlockTables) -> Tensor:
    """[rows] int64: the cache slot of each row, -1 if its block has another's contents."""
    size = tables.block_size
    slots = [
        each[0] * size + position % size if each and tables.is_current(each) else -1
        for each, position in zip(held, positions, strict=True)
    ]
    return torch.tensor(slots, dtype=torch.int64)


def _gather(layer: LayerRows, slots: Tensor) -> Tensor:
    """[rows, kv_heads, K + V width]; a slot of -1 gives the first row, which is not looked at."""
    there = slots.clamp(min=0).to(layer.kv_cache.device)
    size = layer.kv_cache.shape[2]  # a kernel's block may be a part of the scheduler's
    return layer.kv_cache[there // size, :, there % size]


def _offsets(spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    offsets, rows = [], 0
    for start, stop in spans:
        offsets.append(rows)
        rows += stop - start
    return tuple(offsets)


def _row_bytes(kv_cache: Tensor) -> int:
    return kv_cache.shape[1] * kv_cache.shape[3] * kv_cache.element_size()


def _place_for(num_bytes: int, device: torch.device) -> torch.device:
    """The device itself if it has enough free memory, else the host."""
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < ROOM * num_bytes:
        return torch.device("cpu")
    return device


class KvRows:
    """K/V rows that one worker keeps for the K/V gate."""

    def __init__(self, hook: RunnerHook):
        layers = _layers_by_group(hook)
        self._watch = BlockWatch(hook.runner, layers)
        self._groups = {
            group: GroupRows(self._watch.tables[group], theirs) for group, theirs in layers.items()
        }
        self._watch.before_loss = {group: rows.rescue for group, rows in self._groups.items()}

    def watch(self, on: bool) -> None:
        """Start to note a batch's blocks, or stop and forget all rows."""
        for rows in self._groups.values():
            rows.forget_rescued()
        self._watch.switch(on and self.why_unreadable() is None)
        if not on:
            self.drop(None)

    def why_unreadable(self) -> str | None:
        """Why the cache cannot be read row by row; None if it can be."""
        if not self._groups:
            return "there is no target layer with a KV cache"
        found = (rows.why_unreadable() for rows in self._groups.values())
        return next((reason for reason in found if reason is not None), None)

    def keep(
        self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Copy the rows of these positions of these requests, one span a request.

        Returns `unreadable` (None, or why nothing was kept) and `bytes`.
        """
        reason = self.why_unreadable()
        if reason is not None:
            return {"unreadable": reason, "bytes": 0}
        kept = sum(rows.keep(name, requests, spans) for rows in self._groups.values())
        return {"unreadable": None, "bytes": kept}

    def drop(self, names: Sequence[str] | None) -> None:
        """Forget kept rows; None: all of them, and their memory is given back to the device."""
        for rows in self._groups.values():
            rows.drop(names)
        if names is None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def compare(self, name: str, pairs: Sequence[Pair]) -> dict[str, Any]:
        """Errors of kept rows against other kept rows of the same token ids.

        Positions that are not in both sets are left out; the caller knows the spans.

        Returns:
            `checked` and `unknown`: positions compared, and those whose block was reused, of the
            group that knows the fewest.
            `errors`: for each layer and K or V the dicts of `RowErrors.read`, which also have
            `layer`, `name` and `what`; layer by layer.
        """
        found = [rows.compare(name, pairs) for rows in self._groups.values()]
        errors = [entry for each in found for entry in each["errors"]]
        return {
            "checked": min(each["checked"] for each in found),
            "unknown": max(each["unknown"] for each in found),
            "errors": sorted(errors, key=lambda entry: entry["layer"]),
        }


def _layers_by_group(hook: RunnerHook) -> dict[int, list[LayerRows]]:
    context = hook.runner.compilation_config.static_forward_context
    numbers = {name: number for number, name in enumerate(hook.target_layers)}
    found: dict[int, list[LayerRows]] = {}
    for group, each in enumerate(hook.runner.kv_cache_config.kv_cache_groups):
        for name in each.layer_names:
            if name not in numbers:
                continue
            layer = context[name]
            dtype = str(getattr(layer, "kv_cache_dtype", "auto"))
            rows = LayerRows(numbers[name], name, *_rows_of(layer), dtype)
            found.setdefault(group, []).append(rows)
    return found


def _rows_of(layer: Any) -> tuple[Any, int]:
    return rows_of(layer) if hasattr(layer, "head_size") else (layer.kv_cache, 0)
