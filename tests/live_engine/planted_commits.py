"""Faults planted into the commit of one worker, on either runner.

Each changes the cache around a commit, from what stood there before it: eagerly and under full CUDA
graphs alike, whose K/V are known by their addresses alone. A plant takes the worker and is a
context manager: the fault is gone when it ends.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from accepted_rows import accepted_rows
from torch import Tensor

from nwor_bench.plugin.layers import rows_at, slot_index
from nwor_bench.records.types import NworMode, ScvMode

Plant = Callable[[Any], AbstractContextManager[None]]

ALL = 1 << 20
"""A count above any window's."""

UNRELATED = 16
"""Positions that get unrelated K/V."""

LONG = {"V1": 24, "V2": 300}
"""Positions from which a context counts as long, by runner: some of the prompts are longer."""

LATE = {"V1": 62, "V2": 415}
"""Positions that no context has in the windows that the local gate checks, by runner."""


def context_lengths(hook: Any) -> Tensor:
    """[requests or more] int: tokens of each request, the window's included."""
    lengths: Tensor = (
        hook.runner.seq_lens if hook.name == "V1" else hook.runner.input_buffers.seq_lens
    )
    return lengths


def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """With `owner.name` replaced by `make(original)`."""
    return _replaced(owner, name, make(getattr(owner, name)))


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@dataclass(frozen=True)
class Commit:
    """One window around its commit: its slots, what stood in them, and what is accepted."""

    hook: Any
    slots: Tensor
    accepted: Tensor
    """[rows] bool on the V1 runner, [requests] counts on the V2 runner."""
    original: Callable[[Tensor, Tensor], str]
    memory: dict[Any, Any] = field(default_factory=dict)
    """What the plant keeps from window to window."""

    @property
    def on_cpu(self) -> bool:
        """True on the V1 runner, which stages drafts alone."""
        return bool(self.hook.name == "V1")

    @property
    def staging(self) -> Any:
        """The runner's buffers."""
        return self.hook.buffers

    @property
    def layers(self) -> range:
        """Numbers of the target layers."""
        return range(self.staging.num_layers)

    def slots_of(self, layer: int) -> Tensor:
        """[rows] int: a layer's slots; layers of several KV-cache groups have their own."""
        if self.slots.dim() == 1:
            return self.slots
        return self.slots[self.staging.layers[layer].slot_row]

    @cached_property
    def real(self) -> Tensor:
        """[rows] bool: not padding."""
        return self.slots_of(0) >= 0

    @cached_property
    def written(self) -> Tensor:
        """[rows] bool: what a sound commit writes, the certain first token included if staged."""
        if self.on_cpu:
            return self.accepted
        batch = self.staging._batch
        found = accepted_rows(
            self.accepted,
            self.real.numel(),
            certain=batch.certain if self.staging._through is None else batch.certain - 1,
            tokens_per_request=batch.tokens_per_request,
            row_request=batch.row_request,
            row_index=batch.row_index,
        )
        return found & self.real

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """[rows] int each: the request, and the place in its window; the certain token is -1."""
        if self.on_cpu:
            counts = torch.tensor(self.hook.window.batch.num_draft_tokens)
            request = torch.arange(len(counts)).repeat_interleave(counts)
            first = counts.cumsum(0) - counts
            return request, torch.arange(len(request)) - first[request]
        batch = self.staging._batch
        if batch.tokens_per_request is None:
            return batch.row_request, batch.row_index
        rows = torch.arange(self.real.numel(), device=self.slots.device)
        length = batch.tokens_per_request
        return rows // length, rows % length - batch.certain

    def beyond(self, limits: Mapping[str, int]) -> Tensor:
        """[rows] bool: of requests with a context longer than its runner's limit."""
        request = self.places[0].long().clamp(min=0)
        return context_lengths(self.hook).to(request.device)[request] > limits[self.hook.name]

    def cache(self, layer: int) -> Tensor:
        """A layer's cache; fp8 as bytes."""
        cache: Tensor = self.staging.layers[layer].kv_cache
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache

    def read(self, layer: int, slots: Tensor | None = None) -> Tensor:
        """[rows, kv_heads, width] of a layer at these slots (padding reads slot 0)."""
        return rows_at(self.cache(layer), self.slots_of(layer) if slots is None else slots)

    def put(self, layer: int, rows: Tensor, where: Tensor, slots: Tensor | None = None) -> None:
        """Write these rows of a layer where the mask says."""
        cache = self.cache(layer)
        at = (self.slots_of(layer) if slots is None else slots)[where]
        cache[slot_index(cache, at)] = rows[where]

    def run(self, instead: Tensor | None = None) -> str:
        """The sound commit; `instead`: the rows that the V1 runner is to write and to count."""
        if instead is not None and self.on_cpu:
            return self.original(self.slots, instead)
        return self.original(self.slots, self.accepted)

    def rows_of_all(self) -> list[Tensor]:
        """Every layer's staged rows as the cache holds them; the cache is left as it was."""
        if self.on_cpu:
            keys, values = self.staging.key, self.staging.value
            return [torch.cat([keys[n], values[n]], -1)[: len(self.slots)] for n in self.layers]
        before = [self.read(layer) for layer in self.layers]
        self.original(self.slots, torch.full_like(self.accepted, ALL))
        rows = [self.read(layer) for layer in self.layers]
        for layer in self.layers:
            self.put(layer, before[layer], self.real)
        return rows

    def kept(self) -> "Commit":
        """The window for later: vLLM's buffers have other slots by then."""
        kept = replace(self, slots=self.slots.clone(), accepted=self.accepted.clone())
        assert kept.written is not None  # worked out now, while the window is open
        return kept


def commit_replaced(faulty: Callable[[Commit], str]) -> Plant:
    """A plant over the commit of the runner's buffers."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        hook, memory = worker.nwor_hook, {}  # type: ignore[var-annotated]

        def wrap(original: Callable[..., str]) -> Callable[..., str]:
            return lambda slots, accepted: faulty(Commit(hook, slots, accepted, original, memory))

        return wrapped(hook.buffers, "commit", wrap)

    return plant


def after_commit(change: Callable[[Commit], None]) -> Plant:
    """A plant that changes what a sound commit has written."""

    @commit_replaced
    def plant(window: Commit) -> str:
        problem = window.run()
        change(window)
        return problem

    return plant


@after_commit
def head_wrong_in_commit(window: Commit) -> None:
    """K of head 1 of layer 1 has the other sign in the cache."""
    rows, width = window.read(1), window.staging.layers[1].head_dim
    if rows.dtype is torch.uint8:
        rows[:, 1, :width] ^= 0x80
    else:
        rows[:, 1, :width] *= -1
    window.put(1, rows, window.written)


@commit_replaced
def last_layer_one_slot_on(window: Commit) -> str:
    """The last layer's rows land one slot further; all other layers are right."""
    last = window.layers[-1]
    before = window.read(last)
    problem = window.run()
    rows, cache = window.read(last), window.cache(last)
    window.put(last, before, window.written)
    further = (window.slots + 1).clamp(max=cache.shape[0] * cache.shape[2] - 1)
    window.put(last, rows, window.written, further)
    return problem


@commit_replaced
def one_too_few(window: Commit) -> str:
    """The last accepted draft of each request is not written."""
    request, index = window.places
    drafts = window.written & (index >= 0)
    follows = torch.zeros_like(drafts)
    follows[:-1] = drafts[1:] & (request[1:] == request[:-1])
    last = drafts & ~follows
    before = [window.read(layer) for layer in window.layers]
    problem = window.run(instead=window.written & ~last)
    for layer in window.layers:
        window.put(layer, before[layer], last)
    return problem


def _one_row_too_many(spared: ScvMode | None) -> Plant:
    """One rejected draft of each request is written, too, but not in this SCV mode; only V2's
    commits are given counts."""

    @commit_replaced
    def plant(window: Commit) -> str:
        if window.hook.validator.mode is spared:
            return window.run()
        return window.original(window.slots, window.accepted + (window.accepted > 0).int())

    return plant


one_row_too_many = _one_row_too_many(None)
one_row_too_many_in_scv_graph = _one_row_too_many(ScvMode.OFF)


@commit_replaced
def rejected_committed(window: Commit) -> str:
    """The rejected drafts are written, and the accepted ones are not."""
    rows, (_, index) = window.rows_of_all(), window.places
    wanted = torch.where(index >= 0, ~window.written, window.written) & window.real
    for layer in window.layers:
        window.put(layer, rows[layer], wanted)
    return ""


def _skip_a_layer(window: Commit) -> str:
    """Layer 1 is left out."""
    before = window.read(1)
    problem = window.run()
    window.put(1, before, window.real)
    return problem


layer_skipped = commit_replaced(_skip_a_layer)


@after_commit
def values_of_two_layers_swapped(window: Commit) -> None:
    """Layers 0 and 1 get each other's V."""
    width = window.staging.layers[0].head_dim
    first, second = window.read(0), window.read(1)
    value = first[..., width:].clone()
    first[..., width:] = second[..., width:]
    second[..., width:] = value
    window.put(0, first, window.written)
    window.put(1, second, window.written)


@after_commit
def key_and_value_swapped(window: Commit) -> None:
    """Layer 1 gets V where K belongs, and K where V belongs."""
    key, value = window.read(1).chunk(2, dim=-1)
    window.put(1, torch.cat([value, key], dim=-1), window.written)


@commit_replaced
def commit_after_the_next_begin(window: Commit) -> str:
    """A window's slots are written one window later, from the rows that are staged by then."""
    rows = window.rows_of_all()
    late = window.memory.get("late")
    window.memory["late"] = window.kept()
    if late is not None:
        number = min(late.slots.numel(), window.slots.numel())
        for layer in window.layers:
            window.put(layer, rows[layer][:number], late.written[:number], late.slots[:number])
    return ""


@after_commit
def slots_of_two_requests_swapped(window: Commit) -> None:
    """The first two requests of a window get each other's rows, where both have some."""
    request, _ = window.places
    first, second = ((request == n).nonzero()[:, 0] for n in (0, 1))
    number = min(len(first), len(second))
    first, second = first[:number], second[:number]
    both = window.written[first] & window.written[second]
    order = torch.arange(window.slots.numel(), device=window.slots.device)
    order[first[both]], order[second[both]] = second[both], first[both]
    for layer in window.layers:
        window.put(layer, window.read(layer)[order], window.written)


@commit_replaced
def certain_token_dropped(window: Commit) -> str:
    """The certain token of a window that is staged as a whole is left out (V2 runner)."""
    before = [window.read(layer) for layer in window.layers]
    problem = window.run()
    for layer in window.layers:
        window.put(layer, before[layer], window.real & (window.places[1] < 0))
    return problem


@after_commit
def value_rounded_to_fp8(window: Commit) -> None:
    """V of layer 1 is written in three bits of mantissa."""
    rows, width = window.read(1), window.staging.layers[1].head_dim
    rows[..., width:] = rows[..., width:].to(torch.float8_e4m3fn).to(rows.dtype)
    window.put(1, rows, window.written)


@after_commit
def stale_scale(window: Commit) -> None:
    """Layer 1 of an fp8 cache is written with twice its scale."""
    rows = window.read(1).view(torch.float8_e4m3fn).float() / 2
    window.put(1, rows.to(torch.float8_e4m3fn).view(torch.uint8), window.written)


@after_commit
def value_wrong_at_long_context(window: Commit) -> None:
    """V of one head is 1 % too large in the rows of requests that have a long context."""
    rows, width = window.read(1), window.staging.layers[1].head_dim
    rows[:, 1, width:] *= 1.01
    window.put(1, rows, window.written & window.beyond(LONG))


@commit_replaced
def rejected_written_late(window: Commit) -> str:
    """Rejected drafts are written too, in contexts of which the local gate checks no window."""
    rows = window.rows_of_all()
    problem = window.run()
    for layer in window.layers:
        window.put(layer, rows[layer], window.real & ~window.written & window.beyond(LATE))
    return problem


@after_commit
def unrelated_rows(window: Commit) -> None:
    """16 positions of one request get unrelated K/V in every layer, once in each SCV mode."""
    kept = window.memory.setdefault(window.hook.validator.mode, [])
    if len(kept) < UNRELATED:
        kept += window.slots[window.written & (window.places[0] == 0)].tolist()
        if len(kept) >= UNRELATED:
            slots = torch.tensor(kept[:UNRELATED], device=window.slots.device)
            for layer in window.layers:
                _replace_rows(window.staging.layers[layer].kv_cache, slots)


def _replace_rows(cache: Tensor, slots: Tensor) -> None:
    """Other values of the same size at these slots."""
    at = slot_index(cache, slots)
    rows = cache[at].float()
    signs = torch.rand(rows.shape, generator=torch.Generator().manual_seed(3)).to(rows) - 0.5
    cache[at] = (rows.flip(-1) * signs.sign()).to(cache.dtype)


@commit_replaced
def first_accepted_dropped(window: Commit) -> str:
    """The first accepted draft of each window is not written (V1 runner)."""
    fewer = window.written.clone()
    fewer[fewer.nonzero()[:1]] = False
    return window.run(instead=fewer)


def switch_fault(damage: Callable[[Commit], None]) -> Plant:
    """`damage` of the last committed window, each time that off runs behind a cell that stages.

    Its slots are copied: by the time of the switch the drafter has put those of the next window
    into vLLM's buffer, and what is written there is overwritten before anyone reads it.
    """

    @contextmanager
    def plant(worker: Any) -> Iterator[None]:
        hook, last = worker.nwor_hook, []  # type: ignore[var-annotated]

        @commit_replaced
        def remember(window: Commit) -> str:
            last[:] = [window.kept()]
            return window.run()

        def wrap(switch_to: Callable[..., None]) -> Callable[..., None]:
            def faulty(nwor_mode: NworMode, scv_mode: Any) -> None:
                if hook.nwor_mode is NworMode.STAGE and nwor_mode is NworMode.OFF:
                    for window in last:
                        damage(window)
                switch_to(nwor_mode, scv_mode)

            return faulty

        with remember(worker), wrapped(hook, "switch_to", wrap):
            yield

    return plant


@switch_fault
def one_row_lost_at_a_switch(window: Commit) -> None:
    """The last commit's first row is 1 throughout in layer 0."""
    rows = window.read(0)
    one = 0x38 if rows.dtype is torch.uint8 else 1  # of e4m3
    at = window.written.nonzero()[:1, 0]  # none if every draft was rejected
    first = torch.zeros_like(window.written).index_fill(0, at, True)
    window.put(0, torch.full_like(rows, one), first)


def ready_changed(change: Callable[[Commit], str]) -> Plant:
    """A plant that only ready windows of the V2 runner have."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v2.stock_update import ReadyWindow

        def wrap(commit: Callable[..., str]) -> Callable[..., str]:
            def faulty(self: ReadyWindow, call: Any) -> str:
                slots = self.batch.slots
                return change(Commit(worker.nwor_hook, slots, slots, lambda *_: commit(self, call)))

            return faulty

        return wrapped(ReadyWindow, "commit", wrap)

    return plant


layer_skipped_if_ready = ready_changed(_skip_a_layer)


@ready_changed
def row_too_many_if_ready(window: Commit) -> str:
    """A ready window's commit also writes its first row to the slot before it, in every layer."""
    problem = window.run()
    first = torch.zeros_like(window.real)
    first[0] = True
    for layer in window.layers:
        before = (window.slots - 1).clamp(min=0)
        window.put(layer, window.read(layer), first & window.real, before)
    return problem
