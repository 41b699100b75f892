"""Check each target layer of a window on its own inputs: the local gate's part in a worker.

Equal inputs must give equal outputs in every layer, so a fault is seen in the layer that has it,
however the model amplifies rounding. Of a chosen window each layer's inputs and outputs are copied
(`LayerTrace`). After the commit, layer by layer:

- stock's own write of the same K and V must leave the rows that the commit left, bit for bit;
- stock's attention over them is compared with ours, and both with a float64 reference;
- no other row of the cache may have changed since the window began.

Then the cache is restored to its state after the commit. Recurrent layers are checked by
`state_checks`.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from nwor_bench.plugin.layers import rows_at
from nwor_bench.plugin.observe.errors import (
    FIELDS,
    bits_of,
    exact_attention,
    head_errors,
    merged_attention,
)
from nwor_bench.plugin.observe.state_checks import check_states
from nwor_bench.plugin.patching import Patch, PatchSet, noting
from nwor_bench.plugin.state_layers import StateTrace
from nwor_bench.plugin.states import WindowStates
from nwor_bench.plugin.window import LayerCall, LayerTrace, State, Window
from nwor_kernels.attention_step import ScoreRules

SAMPLE = 4
"""Requests of a window that the float64 reference attends."""

SAMPLE_TOKENS = 65536
"""Most tokens of their contexts together; at least one request is attended."""

SUMMED_AT_ONCE = 1 << 24
"""Elements of a cache; 128 MiB as int64."""

SETTLED = 2
"""Windows without prefill are checked from this one on: some drafts have been rejected by then."""

WITH_RINGS = 8
"""Windows of a path that are checked in a row with rings of records (`state_rings`)."""


class CheckedLayer(Protocol):
    """One target layer, as the checks use it."""

    @property
    def name(self) -> str:
        """The layer's name in vLLM."""

    @property
    def owner(self) -> str:
        """Name of the layer whose K/V it reads; its own, unless it shares them."""

    def cache_rows(self) -> Tensor:
        """[blocks, kv_heads, block_size, K + V width], a view of its cache."""

    def trace_patches(self, trace: LayerTrace) -> list[Patch]:
        """The patches that copy what vLLM gives its write and its attention."""

    def stock_write(self, call: LayerCall, slots: Tensor) -> None:
        """Write the first rows of a call's K and V as stock does, one a slot."""

    def stock_attention(self, call: LayerCall, metadata: Any) -> Tensor:
        """Stock's output for a call's queries."""

    def exact_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(K, V) in float64, [tokens, kv_heads, ...] each, of cache rows as attention reads them.

        Args:
            rows: [tokens, kv_heads, K + V width], out of the cache.
        """

    def exact_query(self, call: LayerCall) -> Tensor:
        """[rows, heads, head_dim] float64, a call's queries as they meet `exact_rows`."""

    def attention_facts(self) -> ScoreRules:
        """Terms of its attention besides softmax(q k) v."""


def trace_patches(impl: Any, trace: LayerTrace, name: str, *, writes: bool) -> list[Patch]:
    """`CheckedLayer.trace_patches` of an implementation that takes queries, keys and values."""

    def wrote(layer: Any, key: Tensor, value: Tensor, *_: Any) -> None:
        trace.wrote(name, key, value)

    def asked(layer: Any, query: Tensor, *_: Any, **__: Any) -> None:
        trace.asked(name, query)

    attends = noting(impl, "forward", asked)
    return [noting(impl, "do_kv_cache_update", wrote), attends] if writes else [attends]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step with a window."""

    starts: Sequence[int]
    """[requests + 1], first row of each request."""
    drafts: Sequence[int]
    """[requests], its draft tokens: its last rows."""
    slots: Mapping[str, Tensor]
    """By layer that writes: [rows] int64 or more, stock's slots; negative: not written."""
    path: str
    """How the forward runs: "eager", "piecewise" or "full graph", and "beside prefill"."""
    graph: Hashable = None
    """Which full graph; None for another path."""


@dataclass(frozen=True)
class StepTables:
    """Where a layer finds the contexts of a step's requests."""

    seq_lens: Tensor
    """[requests] int, tokens of each request, this step's included."""
    block_table: Tensor
    """[requests, blocks] int."""
    metadata: Any
    """The layer's attention metadata."""


@dataclass
class _Before:
    """The caches as a window began."""

    step: StepRows
    sums: dict[str, Tensor] = field(default_factory=dict)
    """By layer, [blocks] int64: the sum of each block's elements as integers."""
    blocks: dict[str, Tensor] = field(default_factory=dict)
    """By layer, numbers of the blocks that the step's slots lie in."""
    rows: dict[str, Tensor] = field(default_factory=dict)
    """By layer, their contents."""


@dataclass
class WindowTrace:
    """What all layers are given in a window, and what they return."""

    layers: LayerTrace = field(default_factory=LayerTrace)
    states: StateTrace = field(default_factory=StateTrace)


class Traced(Protocol):
    """Staging, which tells a trace what its attention returned."""

    trace: LayerTrace | None


class LayerChecks:
    """Checks windows of one worker while it is on.

    Args:
        layers: the target layers, in the order of a forward.
        staging: stages these layers.
        states: the target's recurrent states; None if stock keeps them.
        whole: names of layers whose whole cache is read for rows that changed: nothing but these
            layers writes to it. Of other layers, the blocks of the step are read.
    """

    def __init__(
        self,
        layers: Sequence[CheckedLayer],
        staging: Traced,
        states: WindowStates | None,
        whole: Collection[str],
    ):
        self._layers = layers
        self._staging = staging
        self._states = states
        self._owners = [layer for layer in layers if layer.owner == layer.name]
        self._whole = whole
        self._seen: dict[tuple[str, Hashable], int] = {}
        self._before: _Before | None = None
        self.trace = WindowTrace()
        """Trace of the window that is checked."""
        self._tracing = PatchSet(())
        self.windows: list[dict[str, Any]] = []
        """Measurements of each window that was checked."""
        self.spent_s = 0.0
        """Time of checking that no window's `seconds` has yet."""

    def follow(self, trace: WindowTrace | None) -> None:
        """Copy what vLLM gives the layers from now on, in front of every patch; None: no longer."""
        self._tracing.undo()
        self._staging.trace = None if trace is None else trace.layers
        if self._states is not None:
            self._states.follow(None if trace is None else trace.states)
        if trace is not None:
            patches = (p for layer in self._layers for p in layer.trace_patches(trace.layers))
            self._tracing = PatchSet(patches)
            self._tracing.apply()

    def take(self) -> list[dict[str, Any]]:
        """Measurements since the last call; the next batch's windows are chosen afresh."""
        windows, self.windows, self._seen, self._before = self.windows, [], {}, None
        return windows

    def wants(self, path: str, graph: Hashable = None) -> bool:
        """True if the window that begins is to be checked: one beside a prefill, and two in a row
        of each other path and graph, so that the second runs what SCV captures with the first; with
        rings more, so that most of the requests' rings are full once."""
        seen = self._seen[path, graph] = self._seen.get((path, graph), 0) + 1
        has_rings = self._states is not None and self._states.rings is not None
        in_a_row = WITH_RINGS if has_rings else 2
        return seen == 1 if "prefill" in path else SETTLED <= seen < SETTLED + in_a_row

    def begin(self, step: StepRows) -> None:
        """Remember the caches; call it once the window is open, before its forward."""
        began = perf_counter()
        before = self._before = _Before(step)
        for layer in self._owners:
            rows = layer.cache_rows()
            slots = torch.cat([step.slots[name][: step.starts[-1]] for name in self._beside(layer)])
            blocks = torch.unique(slots[slots >= 0] // rows.shape[2])
            before.blocks[layer.name] = blocks
            before.rows[layer.name] = bits_of(rows)[blocks]
            if layer.name in self._whole:
                before.sums[layer.name] = _sums(rows)
        self.spent_s += perf_counter() - began

    def _beside(self, layer: CheckedLayer) -> list[str]:
        """Layers that write to the same tensor: those of several groups, in blocks of their own."""
        place, shape = layer.cache_rows().data_ptr(), layer.cache_rows().shape
        return [
            owner.name
            for owner in self._owners
            if owner.cache_rows().data_ptr() == place and owner.cache_rows().shape == shape
        ]

    def ended(
        self,
        window: Window,
        num_sampled: Sequence[int],
        tables_of: Callable[[], Mapping[str, StepTables]],
    ) -> bool:
        """Check a window that has been committed; True if it was checked.

        One that fell back is not checked: the next of its path is.

        Args:
            window: not yet closed; its begin was remembered.
            num_sampled: tokens that each request got.
        """
        before, self._before = self._before, None
        if before is None:
            return False
        if window.state is not State.COMMITTED:
            self._seen[before.step.path, before.step.graph] -= 1
            return False
        drafts = before.step.drafts
        accepted = [min(max(n - 1, 0), most) for n, most in zip(num_sampled, drafts, strict=True)]
        if window.is_control:
            accepted = list(drafts)  # every draft was written, and may stay
        self._check(before, accepted, tables_of())
        if self._states is not None:
            self.windows[-1]["layers"] += check_states(
                self._states.layers, self.trace.states, num_sampled, is_control=window.is_control
            )
        return True

    def _check(
        self, before: _Before, accepted: Sequence[int], tables: Mapping[str, StepTables]
    ) -> None:
        began = perf_counter()
        kept = _kept_rows(before.step, accepted)
        sample = _sample(before.step, next(iter(tables.values())).seq_lens)
        measured: dict[str, Any] = {
            "path": before.step.path,
            "requests": len(accepted),
            "rows": before.step.starts[-1],
            "rejected": sum(before.step.drafts) - sum(accepted),
            "sampled": len(sample),
            "whole_caches": len(self._whole),
            "layers": [],
        }
        for owner in self._owners:
            measured["layers"] += self._check_owner(owner, before, kept, sample, tables)
        measured["seconds"] = self.spent_s + perf_counter() - began
        self.spent_s = 0.0
        self.windows.append(measured)

    def _check_owner(
        self,
        owner: CheckedLayer,
        before: _Before,
        kept: Tensor,
        sample: Sequence[int],
        tables: Mapping[str, StepTables],
    ) -> list[dict[str, Any]]:
        cache, blocks = bits_of(owner.cache_rows()), before.blocks[owner.name]
        slots = before.step.slots[owner.name][: before.step.starts[-1]]
        kept = kept.to(slots.device)
        after = cache[blocks]
        owner_entry: dict[str, Any] = {"layer": owner.name}
        owner_entry |= self._strangers(owner, before, after, kept)
        entries = [owner_entry]
        left = rows_at(cache, slots)
        owner.stock_write(self.trace.layers.calls[owner.name], slots)
        stored = kept & (slots >= 0)
        owner_entry |= _write_errors(left, rows_at(cache, slots), stored, before.step.starts)
        for layer in self._layers:
            if layer.owner != owner.name:
                continue
            entry: dict[str, Any] = owner_entry if layer is owner else {"layer": layer.name}
            entry["attention"] = self._attention(layer, before.step, sample, tables[layer.name])
            if layer is not owner:
                entries.append(entry)
        cache[blocks] = after
        return entries

    def _strangers(
        self, layer: CheckedLayer, before: _Before, after: Tensor, kept: Tensor
    ) -> dict[str, Any]:
        """Rows that changed although the step does not write them: how many, and the first."""
        blocks, size = before.blocks[layer.name], layer.cache_rows().shape[2]
        slots = [before.step.slots[name][: len(kept)][kept] for name in self._beside(layer)]
        written = torch.cat(slots)
        written = written[written >= 0]
        changed = (after != before.rows[layer.name]).any(-1).any(1)
        place = torch.searchsorted(blocks, written // size)
        changed[place, written % size] = False
        strangers = [[int(blocks[b]), int(row)] for b, row in changed.nonzero().tolist()]
        if layer.name in before.sums:
            moved = _sums(layer.cache_rows()) != before.sums[layer.name]
            moved[blocks] = False
            strangers += [[int(block), -1] for block in moved.nonzero().flatten().tolist()]
        return {"strangers": len(strangers), "first_stranger": strangers[0] if strangers else None}

    def _attention(
        self, layer: CheckedLayer, step: StepRows, sample: Sequence[int], tables: StepTables
    ) -> dict[str, Any]:
        call = self.trace.layers.calls.get(layer.name, LayerCall())
        if call.output is None:
            return {"missing": True}
        stock = layer.stock_attention(call, tables.metadata)
        queries, facts = layer.exact_query(call), layer.attention_facts()
        exact, derivative, expected, rows = [], [], [], []
        for request in sample:
            first, last = step.starts[request], step.starts[request + 1]
            context = _context(layer.cache_rows(), tables, request)
            given = (queries[first:last], *layer.exact_rows(context))
            of_request = exact_attention(*given, facts)
            exact.append(of_request[0])
            derivative.append(of_request[1])
            if call.is_merged:
                dtype = call.output.dtype
                expected.append(merged_attention(*given, facts.scale, dtype, causal=call.is_causal))
            rows.append(torch.arange(first, last, device=stock.device))
        drafted = _drafted(step).to(stock.device)
        shape = exact[0].shape[1:]  # an output may have its heads flattened
        ours, theirs = (out.view(len(out), *shape)[drafted] for out in (call.output, stock))
        place = torch.searchsorted(drafted, torch.cat(rows))
        bounds = torch.tensor(list(step.starts[1:]))
        heads, pooled = head_errors(
            ours,
            theirs,
            place,
            torch.cat(exact),
            torch.cat(derivative),
            torch.cat(expected) if expected else None,
        )
        return {
            "fields": list(FIELDS),
            "heads": _plain(heads),
            "pooled": _plain(pooled),
            "rows": int(sum(part.numel() for part in rows)),
            "requests": torch.searchsorted(bounds, drafted.cpu(), right=True).tolist(),
        }


def _kept_rows(step: StepRows, accepted: Sequence[int]) -> Tensor:
    """[rows] bool on the host: all but rejected drafts."""
    kept = torch.ones(step.starts[-1], dtype=torch.bool)
    for end, drafts, taken in zip(step.starts[1:], step.drafts, accepted, strict=True):
        kept[end - drafts + taken : end] = False
    return kept


def _sample(step: StepRows, seq_lens: Tensor) -> list[int]:
    """Requests with drafts for the reference: spread from the shortest context to the longest."""
    lengths = seq_lens.tolist()
    drafted = sorted((r for r, n in enumerate(step.drafts) if n), key=lambda r: lengths[r])
    most = min(SAMPLE, len(drafted))
    chosen = [drafted[i * (len(drafted) - 1) // max(most - 1, 1)] for i in range(most)]
    room, sample = SAMPLE_TOKENS, list[int]()
    for request in dict.fromkeys(chosen):
        if not sample or lengths[request] <= room:
            sample.append(request)
            room -= lengths[request]
    return sample


def _drafted(step: StepRows) -> Tensor:
    spans = zip(step.starts, step.starts[1:], step.drafts, strict=False)
    return torch.cat([torch.arange(first, last) for first, last, drafts in spans if drafts])


def _context(cache: Tensor, tables: StepTables, request: int) -> Tensor:
    """[tokens, kv_heads, width]: a request's cached rows, in the order of its positions."""
    length, size = int(tables.seq_lens[request]), cache.shape[2]
    blocks = tables.block_table[request, : -(-length // size)].long()
    rows = bits_of(cache)[blocks].transpose(1, 2).flatten(0, 1)[:length]
    return rows.view(cache.dtype)


def _write_errors(
    left: Tensor, stock: Tensor, kept: Tensor, starts: Sequence[int]
) -> dict[str, Any]:
    """Rows that differ between stock's write and the commit: how many, and the first."""
    differing = (bits_of(left) != bits_of(stock)).any(-1) & kept[:, None]
    errors: dict[str, Any] = {"written": int(kept.sum()), "differing": int(differing.sum())}
    errors["first_differing"] = None
    if errors["differing"]:
        row, head = differing.nonzero()[0].tolist()
        request = next(r for r in range(len(starts) - 1) if row < starts[r + 1])
        errors["first_differing"] = [request, row - starts[request], head]
    return errors


def _sums(rows: Tensor) -> Tensor:
    """[blocks] int64: the sum of each block's elements as integers, eight bytes at a time.

    One element at a time only if they are not aligned so, and then a few blocks at a time: PyTorch
    makes every element an int64 before it adds them (28 times slower on a CPU).
    """
    packed = 8 // rows.element_size()
    *strides, last = rows.stride()
    if last == 1 and not any(n % packed for n in (*strides, rows.shape[-1], rows.storage_offset())):
        return rows.view(torch.int64).sum((1, 2, 3))
    bits = bits_of(rows)
    few = max(1, SUMMED_AT_ONCE // max(bits[:1].numel(), 1))
    return torch.cat([part.sum((1, 2, 3), dtype=torch.int64) for part in torch.split(bits, few)])


def _plain(numbers: Tensor) -> Any:
    def finite(value: Any) -> Any:
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return value if math.isfinite(value) else None

    return finite(numbers.tolist())
