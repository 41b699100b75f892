"""K/V rows of finished requests, copied out of the cache under a name and compared by name.

Which blocks a request was given is noted from the scheduler's output, for each KV-cache group: each
gives a request blocks of its own. After a request has finished its blocks keep their contents until
they are given away again. vLLM gives a request's last, partly filled block away first, within the
same batch: blocks about to be lost are reported in time to copy their rows.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.layers import rows_at, rows_of
from nwor_bench.plugin.observe.errors import place_for
from nwor_bench.plugin.observe.kept_rows import KeptPair, KeptRows, RowPart, RowStore
from nwor_bench.plugin.patching import Patch
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.scheduler_output import external_request_id

NULL_BLOCK = 0
"""vLLM's empty block, in place of blocks that a layer no longer needs."""

Held = tuple[int, int]
"""A block, and how often it had been reused when the request got it."""


class BlockTables:
    """Block tables of one KV-cache group for every request since `clear`.

    Args:
        block_sizes: tokens a block, one for each KV-cache group; all share one pool of blocks.
    """

    def __init__(self, block_sizes: Sequence[int], group: int):
        self.block_size = block_sizes[group]
        self._block_sizes = tuple(block_sizes)
        self._group = group
        self._given: Counter[int] = Counter()
        self._tables: dict[str, list[Held]] = {}
        self._held: set[Held] = set()

    def clear(self) -> None:
        """Forget all requests."""
        self._given.clear()
        self._tables.clear()
        self._held.clear()

    def note(self, output: Any) -> list[Held]:
        """Take over the blocks of one step's scheduler output.

        Returns the noted blocks that are given away again in this step: their request has finished,
        or they have left its sliding window. Their contents are lost once the step runs.

        A block counts as given away before any table is written down: a request may hit a block
        that another one gets in the same step, and both then hold the same contents.
        """
        changes = list(_changes(output))
        lost = [held for held in self._given_now(changes) if held in self._held]
        for req_id, blocks, computed in changes:
            name = external_request_id(req_id)
            if computed is not None:
                self._tables[name] = []
            if name in self._tables:  # else it began before this was switched on
                held = [(block, self._given[block]) for block in blocks[self._group]]
                self._tables[name] += held
                self._held.update(held)
        return lost

    def _given_now(
        self, changes: Iterable[tuple[str, Sequence[list[int]], int | None]]
    ) -> Iterator[Held]:
        """Count the blocks that are given away; each as it was held until now."""
        for _, blocks, computed in changes:
            for size, ids in zip(self._block_sizes, blocks, strict=True):
                hits = 0 if computed is None else computed // size
                for block in ids[hits:]:
                    yield block, self._given[block]
                    self._given[block] += 1

    def held(self, name: str, start: int, stop: int) -> list[Held | None]:
        """The block of each position from `start` to `stop`; None if there is none."""
        table = self._tables.get(name, [])
        blocks = [position // self.block_size for position in range(start, stop)]
        found = [table[block] if block < len(table) else None for block in blocks]
        return [held if held and held[0] != NULL_BLOCK else None for held in found]

    def is_current(self, held: Held) -> bool:
        """True if the block has not been given to another request since."""
        block, times = held
        return self._given[block] == times


def _changes(output: Any) -> Iterator[tuple[str, Sequence[list[int]], int | None]]:
    """(request, its blocks of each group, tokens that were in the cache already).

    The last is None for blocks that come on top of those which the request has.
    """
    for new in output.scheduled_new_reqs:  # V2 sends resumed requests as new ones, too
        yield new.req_id, new.block_ids, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for i, req_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        if blocks is not None:
            resumed = req_id in cached.resumed_req_ids
            yield req_id, blocks, cached.num_computed_tokens[i] if resumed else None


ROOM = 8
"""Rows stay on a GPU that has this many times their size free, else they go to the host."""

RESCUE_BYTES = 1 << 30
"""Most bytes of rows that are copied before their blocks are reused; the rest is lost."""


@dataclass(frozen=True)
class LayerRows:
    """A target layer's cache, and where V begins in a row; of latent rows the rotary part."""

    number: int
    """The layer's place among the target layers."""
    name: str
    kv_cache: Any
    """[blocks, kv_heads, block_size, K + V width], not contiguous; recurrent layers have others."""
    head_dim: int
    cache_dtype: str

    def parts(self, tensor: int) -> Iterator[RowPart]:
        """K and V of this kept tensor."""
        for what, columns in (("K", slice(0, self.head_dim)), ("V", slice(self.head_dim, None))):
            labels = {"layer": self.number, "name": self.name, "what": what}
            yield RowPart(tensor, labels, columns, self.cache_dtype)


class GroupRows(RowStore):
    """K/V rows of one KV-cache group's target layers, which have them in the same blocks."""

    def __init__(self, tables: BlockTables, layers: Sequence[LayerRows]):
        super().__init__(part for n, layer in enumerate(layers) for part in layer.parts(n))
        self._tables = tables
        self._rescued: dict[Held, list[Tensor]] = {}
        self._layers = layers

    def forget_blocks(self) -> None:
        """Forget the requests' blocks and their copies: another batch begins."""
        self._rescued.clear()
        self._tables.clear()

    def note(self, scheduler_output: Any) -> None:
        """Take over a step's blocks; rows whose block it gives away are copied first."""
        size = self._tables.block_size
        for held in self._tables.note(scheduler_output):
            if (len(self._rescued) + 1) * size * self._row_bytes() > RESCUE_BYTES:
                return  # the rest is lost
            slots = held[0] * size + torch.arange(size)
            self._rescued[held] = [rows_at(layer.kv_cache, slots) for layer in self._layers]

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

    def keep(self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]]) -> None:
        """Copy the rows of these positions of these requests, one span a request."""
        held = [
            each
            for request, (start, stop) in zip(requests, spans, strict=True)
            for each in self._tables.held(request, start, stop)
        ]
        offsets = [position for start, stop in spans for position in range(start, stop)]
        places = _places(held, offsets, self._tables)
        known = places >= 0
        device = self._layers[0].kv_cache.device
        there = place_for(len(held) * self._row_bytes(), device, ROOM)
        slots = places.to(device)
        rows = [rows_at(layer.kv_cache, slots).to(there) for layer in self._layers]
        for block, copies in self._rescued.items():
            index = [i for i, each in enumerate(held) if each == block]
            known[index] = True
            inside = [offsets[i] % self._tables.block_size for i in index]
            for layer_rows, copy in zip(rows, copies, strict=True):
                layer_rows[index] = copy[inside].to(there)
        self._kept[name] = KeptRows(spans, known, rows, device)

    def _row_bytes(self) -> int:
        caches = [layer.kv_cache for layer in self._layers]
        return sum(each.shape[1] * each.shape[3] * each.element_size() for each in caches)


def _places(held: Sequence[Held | None], positions: Sequence[int], tables: BlockTables) -> Tensor:
    """[rows] int64: the cache slot of each row, -1 if its block has another's contents."""
    size = tables.block_size
    slots = [
        each[0] * size + position % size if each and tables.is_current(each) else -1
        for each, position in zip(held, positions, strict=True)
    ]
    return torch.tensor(slots, dtype=torch.int64)


class KvRows:
    """K/V rows that one worker keeps for the K/V gate; the runner is wrapped while it is on."""

    def __init__(self, hook: RunnerHook):
        groups = hook.runner.kv_cache_config.kv_cache_groups
        sizes = [each.kv_cache_spec.block_size for each in groups]
        self._groups = {
            group: GroupRows(BlockTables(sizes, group), layers)
            for group, layers in _layers_by_group(hook).items()
        }
        self._patch = Patch(hook.runner, "execute_model", self._wrap)

    def watch(self, on: bool) -> None:
        """Start to note a batch's blocks, again if already on; or stop and forget all rows."""
        for rows in self._groups.values():
            rows.forget_blocks()
        if not on:
            self._patch.undo()
            self.drop(None)
        elif not self._patch.applied and self.why_unreadable() is None:
            self._patch.apply()

    def _wrap(self, original: Any) -> Any:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("dummy_run"):
                for rows in self._groups.values():
                    rows.note(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    def why_unreadable(self) -> str | None:
        """Why the cache cannot be read row by row; None if it can be."""
        if not self._groups:
            return "there is no target layer with a KV cache"
        found = (lost(Feature.GATE), *(rows.why_unreadable() for rows in self._groups.values()))
        return next((reason for reason in found if reason is not None), None)

    def keep(
        self, name: str, requests: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> dict[str, Any]:
        """Copy the rows of these positions of these requests, one span a request.

        Returns `unreadable`: None, or why nothing was kept; `tokens`, of states, is empty.
        """
        reason = self.why_unreadable()
        for rows in self._groups.values() if reason is None else ():
            rows.keep(name, requests, spans)
        return {"unreadable": reason, "tokens": []}

    def drop(self, names: Sequence[str] | None) -> None:
        """Forget kept rows; None: all of them, and their memory is given back to the device."""
        for rows in self._groups.values():
            rows.drop(names)
        if names is None and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def compare(self, name: str, pairs: Sequence[KeptPair]) -> dict[str, Any]:
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
            has_heads = hasattr(layer, "head_size")
            cache, head_dim = rows_of(layer) if has_heads else (layer.kv_cache, 0)
            rows = LayerRows(numbers[name], name, cache, head_dim, dtype)
            found.setdefault(group, []).append(rows)
    return found
