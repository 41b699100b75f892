"""Faults planted into the staging of one worker on a GPU (vLLM's V2 runner).

Most change the cache right after the commit, from what stood there before it: that is the same
eagerly and under full CUDA graphs, whose K/V are known by their addresses alone. Staging and
attention are part of a captured graph, so those faults are planted before the capture
(`captured_anew`). Each takes the worker and is a context manager.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from accepted_rows import accepted_rows
from planted_cpu import UNRELATED, Plant, at_each_switch_to_off, replace_rows, wrapped
from torch import Tensor

ALL = 1 << 20
"""A count above any window's."""


@contextmanager
def captured_anew(worker: Any, plant: Plant) -> Iterator[None]:
    """With the fault in the graphs that stage; vLLM's own and all others are captured again."""
    try:
        with plant(worker):
            drop_captures(worker)
            yield
    finally:
        drop_captures(worker)


def drop_captures(worker: Any) -> None:
    """Have the next switch to mode stage capture its graphs, and SCV its launches."""
    from nwor_bench.records.types import NworMode, ScvMode

    hook = worker.nwor_hook
    hook.set_modes(NworMode.OFF, ScvMode.OFF)
    torch.cuda.synchronize()
    hook.graphs.shapes.clear()
    hook.graphs._manager = None
    hook._parts.planner._replays.clear()
    for each in hook.buffers.sets:
        each.forget_launches()
    hook.validator._graphs.clear()
    hook.validator._trials.clear()


@dataclass(frozen=True)
class Commit:
    """One window around its commit: its slots, what stood in them, and what is accepted."""

    staging: Any
    slots: Tensor
    counts: Tensor
    original: Callable[[Tensor, Tensor], str]

    @cached_property
    def real(self) -> Tensor:
        """[rows] bool: not padding."""
        return self.slots >= 0

    @cached_property
    def written(self) -> Tensor:
        """[rows] bool: what a sound commit writes, the certain first token included."""
        batch = self.staging._batch
        certain = batch.certain if self.staging._through is None else batch.certain - 1
        found = accepted_rows(
            self.counts,
            self.slots.numel(),
            certain=certain,
            tokens_per_request=batch.tokens_per_request,
            row_request=batch.row_request,
            row_index=batch.row_index,
        )
        return found & self.real

    @cached_property
    def index(self) -> Tensor:
        """[rows] int: place of each row in its window; the certain token is -1."""
        batch = self.staging._batch
        if batch.tokens_per_request is None:
            return batch.row_index
        rows = torch.arange(self.slots.numel(), device=self.slots.device)
        return rows % batch.tokens_per_request - batch.certain

    @property
    def request(self) -> Tensor:
        """[rows] int: the request of each row."""
        batch = self.staging._batch
        if batch.tokens_per_request is None:
            return batch.row_request
        rows = torch.arange(self.slots.numel(), device=self.slots.device)
        return rows // batch.tokens_per_request

    @property
    def layers(self) -> range:
        """Numbers of the target layers."""
        return range(self.staging.num_layers)

    def cache(self, layer: int) -> Tensor:
        """A layer's cache; fp8 as bytes."""
        cache: Tensor = self.staging.layers[layer].kv_cache
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache

    def read(self, layer: int, slots: Tensor | None = None) -> Tensor:
        """[rows, kv_heads, width] of a layer at these slots (padding reads slot 0)."""
        cache = self.cache(layer)
        at = (self.slots if slots is None else slots).clamp(min=0)
        return cache[at // cache.shape[2], :, at % cache.shape[2]].clone()

    def put(self, layer: int, rows: Tensor, where: Tensor, slots: Tensor | None = None) -> None:
        """Write these rows of a layer where the mask says."""
        cache = self.cache(layer)
        at = (self.slots if slots is None else slots)[where]
        cache[at // cache.shape[2], :, at % cache.shape[2]] = rows[where]

    def run(self) -> str:
        """The sound commit."""
        return self.original(self.slots, self.counts)

    def rows_of_all(self) -> list[Tensor]:
        """Every layer's staged rows as the cache holds them; the cache is left as it was."""
        before = [self.read(layer) for layer in self.layers]
        self.original(self.slots, torch.full_like(self.counts, ALL))
        rows = [self.read(layer) for layer in self.layers]
        for layer in self.layers:
            self.put(layer, before[layer], self.real)
        return rows


def commit_replaced(faulty: Callable[[Commit, dict[str, Any]], str]) -> Plant:
    """A plant over `GpuStaging.commit`; `faulty` is given the window and a memory of its own."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        staging, memory = worker.nwor_hook.buffers, {"hook": worker.nwor_hook}

        def wrap(original: Callable[..., str]) -> Callable[..., str]:
            return lambda slots, counts: faulty(Commit(staging, slots, counts, original), memory)

        return wrapped(staging, "commit", wrap)

    return plant


@commit_replaced
def head_wrong_in_commit(window: Commit, memory: dict[str, Any]) -> str:
    """K of head 1 of layer 1 has the other sign in the cache."""
    problem = window.run()
    rows, width = window.read(1), window.staging.layers[1].head_dim
    if rows.dtype is torch.uint8:
        rows[:, 1, :width] ^= 0x80
    else:
        rows[:, 1, :width] *= -1
    window.put(1, rows, window.written)
    return problem


@commit_replaced
def last_layer_one_slot_on(window: Commit, memory: dict[str, Any]) -> str:
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
def one_too_few(window: Commit, memory: dict[str, Any]) -> str:
    """The last accepted draft of each window is not written."""
    before = [window.read(layer) for layer in window.layers]
    problem = window.run()
    drafts = window.written & (window.index >= 0)
    follows = torch.zeros_like(drafts)
    follows[:-1] = drafts[1:] & (window.request[1:] == window.request[:-1])
    for layer in window.layers:
        window.put(layer, before[layer], drafts & ~follows)
    return problem


@commit_replaced
def one_too_many(window: Commit, memory: dict[str, Any]) -> str:
    """One rejected draft of each request is written, too."""
    return window.original(window.slots, window.counts + (window.counts > 0).int())


@commit_replaced
def one_too_many_in_scv_graph(window: Commit, memory: dict[str, Any]) -> str:
    """One rejected draft of each request is written, too, if the device validates."""
    from nwor_bench.records.types import ScvMode

    if memory["hook"].validator.mode is ScvMode.OFF:
        return window.run()
    return window.original(window.slots, window.counts + (window.counts > 0).int())


@commit_replaced
def rejected_committed(window: Commit, memory: dict[str, Any]) -> str:
    """The rejected drafts are written, and the accepted ones are not."""
    rows, drafts = window.rows_of_all(), window.index >= 0
    wanted = torch.where(drafts, ~window.written, window.written) & window.real
    for layer in window.layers:
        window.put(layer, rows[layer], wanted)
    return ""


@commit_replaced
def layer_skipped(window: Commit, memory: dict[str, Any]) -> str:
    """Layer 1 is left out."""
    before = window.read(1)
    problem = window.run()
    window.put(1, before, window.real)
    return problem


@commit_replaced
def values_of_two_layers_swapped(window: Commit, memory: dict[str, Any]) -> str:
    """Layers 0 and 1 get each other's V."""
    problem = window.run()
    first, second, width = window.read(0), window.read(1), window.staging.layers[0].head_dim
    first[..., width:], second[..., width:] = (
        second[..., width:].clone(),
        first[..., width:].clone(),
    )
    window.put(0, first, window.written)
    window.put(1, second, window.written)
    return problem


@commit_replaced
def key_and_value_swapped(window: Commit, memory: dict[str, Any]) -> str:
    """Layer 1 gets V where K belongs, and K where V belongs."""
    problem = window.run()
    key, value = window.read(1).chunk(2, dim=-1)
    window.put(1, torch.cat([value, key], dim=-1), window.written)
    return problem


@commit_replaced
def commit_after_the_next_begin(window: Commit, memory: dict[str, Any]) -> str:
    """A window's slots are written one window later, from the rows that are staged by then."""
    rows = window.rows_of_all()
    waiting = memory.get("waiting")
    memory["waiting"] = (window.slots.clone(), window.written.clone())
    if waiting is not None:
        slots, written = waiting
        number = min(slots.numel(), window.slots.numel())
        for layer in window.layers:
            window.put(layer, rows[layer][:number], written[:number], slots[:number])
    return ""


@commit_replaced
def slots_of_two_requests_swapped(window: Commit, memory: dict[str, Any]) -> str:
    """The first two requests of a window get each other's rows."""
    length = window.staging._batch.tokens_per_request
    rows = window.rows_of_all()
    order = torch.arange(window.slots.numel(), device=window.slots.device)
    if length is not None and order.numel() >= 2 * length:
        order[: 2 * length] = order[: 2 * length].roll(length)
    for layer in window.layers:
        window.put(layer, rows[layer][order], window.written)
    return ""


@commit_replaced
def first_token_not_written(window: Commit, memory: dict[str, Any]) -> str:
    """The certain token of a window that is staged as a whole is left out."""
    before = [window.read(layer) for layer in window.layers]
    problem = window.run()
    for layer in window.layers:
        window.put(layer, before[layer], window.real & (window.index < 0))
    return problem


@commit_replaced
def value_rounded_to_fp8(window: Commit, memory: dict[str, Any]) -> str:
    """V of layer 1 is written in three bits of mantissa."""
    problem = window.run()
    rows, width = window.read(1), window.staging.layers[1].head_dim
    rows[..., width:] = rows[..., width:].to(torch.float8_e4m3fn).to(rows.dtype)
    window.put(1, rows, window.written)
    return problem


@commit_replaced
def stale_scale(window: Commit, memory: dict[str, Any]) -> str:
    """Layer 1 of an fp8 cache is written with twice its scale."""
    problem = window.run()
    rows = window.read(1).view(torch.float8_e4m3fn).float() / 2
    window.put(1, rows.to(torch.float8_e4m3fn).view(torch.uint8), window.written)
    return problem


def written_directly_in_secret(worker: Any) -> AbstractContextManager[None]:
    """Every draft is written before the window is decided, and counted as staged."""
    window, staging = worker.nwor_hook.window, worker.nwor_hook.buffers

    def wrap(accept: Callable[..., bool]) -> Callable[..., bool]:
        def faulty(*args: Any) -> bool:
            staging.write_directly(list(range(staging.num_layers)), window.batch.slots)
            return accept(*args)

        return faulty

    return wrapped(window, "accept", wrap)


def head_wrong_in_staging(worker: Any) -> AbstractContextManager[None]:
    """K of head 1 of layer 1 has the other sign where it is staged."""
    staging = worker.nwor_hook.buffers

    def wrap(stage: Callable[..., str]) -> Callable[..., str]:
        def faulty(layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
            if layer == 1:
                head = key[:, 1]  # in place: all layers' rows must lie alike
                head[rows] = -head[rows]
            return stage(layer, key, value, rows)

        return faulty

    return wrapped(staging, "stage", wrap)


def attention_wrapped(hide: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """A plant over attention: `hide(starts, ends)` gives the staged row of each request that is
    read as zeros, for all that attention can then find of it."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v2 import attention as gpu_attention

        def wrap(attend: Callable[..., None]) -> Callable[..., None]:
            def faulty(step: Any, *rest: Any) -> None:
                starts, ends = step.requests.staged_start, step.requests.staged_end
                rows = hide(starts.long(), ends.long()).clamp(0, step.key.shape[0] - 1)
                key, value = (each.index_fill(0, rows, 0) for each in (step.key, step.value))
                attend(step._replace(key=key, value=value), *rest)

            return faulty

        return wrapped(gpu_attention, "verify_attention_triton", wrap)

    return plant


last_row_missed = attention_wrapped(lambda starts, ends: ends - 1)
first_row_missed = attention_wrapped(lambda starts, ends: starts)


def attend_to_the_cache(
    self: Any, batch: Any, query: Any, kv_cache: Any, metadata: Any, output: Any
) -> Any:
    """In place of `StagingAttention._verify`: vLLM's attention, in which no window is staged."""
    from nwor_bench.plugin.runner_v2.attention_decision import Contender

    layer = self._layer
    type(layer.impl).forward(layer.impl, layer, query, None, None, kv_cache, metadata, output)
    return Contender.OURS


def stale_attention(worker: Any) -> AbstractContextManager[None]:
    """The write is skipped and attention reads only the cache: the first published NWOR."""
    from nwor_bench.plugin.runner_v2 import attention as gpu_attention

    return wrapped(gpu_attention.StagingAttention, "_verify", lambda _: attend_to_the_cache)


def switch_fault(damage: Callable[[Commit], None]) -> Plant:
    """`damage` of the last committed window, at each switch from stage to off.

    Its slots are copied: by the time of the switch the drafter has put those of the next window
    into vLLM's buffer, and what is written there is overwritten before anyone reads it.
    """

    @contextmanager
    def plant(worker: Any) -> Iterator[None]:
        last: list[Commit] = []

        @commit_replaced
        def remember(window: Commit, memory: dict[str, Any]) -> str:
            kept = replace(window, slots=window.slots.clone(), counts=window.counts.clone())
            assert kept.written is not None  # worked out now, while the window is open
            last[:] = [kept]
            return window.run()

        def harm() -> None:
            for window in last:
                damage(window)

        with remember(worker), at_each_switch_to_off(worker.nwor_hook, harm):
            yield

    return plant


@switch_fault
def rows_lost_at_a_switch(window: Commit) -> None:
    """The last commit's rows are zero in every layer."""
    for layer in window.layers:
        window.put(layer, torch.zeros_like(window.read(layer)), window.written)


@switch_fault
def one_row_lost_at_a_switch(window: Commit) -> None:
    """The last commit's first row is 1 throughout in layer 0."""
    rows = window.read(0)
    one = 0x38 if rows.dtype is torch.uint8 else 1  # of e4m3
    at = window.written.nonzero()[:1, 0]  # none if every draft was rejected
    first = torch.zeros_like(window.written).index_fill(0, at, True)
    window.put(0, torch.full_like(rows, one), first)


LONG = 300
"""Positions from which a context counts as long: two of the prompts are longer."""


@commit_replaced
def value_wrong_at_long_context(window: Commit, memory: dict[str, Any]) -> str:
    """V of one head is 1 % too large in the rows of requests that have a long context."""
    problem = window.run()
    rows, width = window.read(1), window.staging.layers[1].head_dim
    lengths = memory["hook"].runner.input_buffers.seq_lens
    long = lengths[window.request.long().clamp(min=0)] > LONG
    rows[:, 1, width:] *= 1.01
    window.put(1, rows, window.written & long)
    return problem


@commit_replaced
def unrelated_rows(window: Commit, memory: dict[str, Any]) -> str:
    """16 positions of one request get unrelated K/V in every layer, once in each SCV mode."""
    problem = window.run()
    kept = memory.setdefault(memory["hook"].validator.mode, [])
    if len(kept) < UNRELATED:
        kept += window.slots[window.written & (window.request == 0)].tolist()
        if len(kept) >= UNRELATED:
            slots = torch.tensor(kept[:UNRELATED], device=window.slots.device)
            for layer in window.layers:
                replace_rows(window.staging.layers[layer].kv_cache, slots)
    return problem


def ready_changed(change: Callable[[Any, Any, Callable[[], str]], str]) -> Plant:
    """A plant that only ready windows have: `change(staging, slots, commit)` in place of the
    commit."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v2.stock_update import ReadyWindow

        staging = worker.nwor_hook.buffers

        def wrap(commit: Callable[..., str]) -> Callable[..., str]:
            def faulty(self: ReadyWindow, call: Any) -> str:
                return change(staging, self.batch.slots, lambda: commit(self, call))

            return faulty

        return wrapped(ReadyWindow, "commit", wrap)

    return plant


@ready_changed
def layer_skipped_if_ready(staging: Any, slots: Tensor, commit: Callable[[], str]) -> str:
    """A ready window's commit leaves layer 1 out."""
    window = Commit(staging, slots, slots, lambda *_: commit())
    before = window.read(1)
    problem = window.run()
    window.put(1, before, window.real)
    return problem


@ready_changed
def row_too_many_if_ready(staging: Any, slots: Tensor, commit: Callable[[], str]) -> str:
    """A ready window's commit also writes its first row to the slot before it, in every layer."""
    window = Commit(staging, slots, slots, lambda *_: commit())
    problem = window.run()
    first = torch.zeros_like(window.real)
    first[0] = True
    for layer in window.layers:
        window.put(layer, window.read(layer), first & window.real, (slots - 1).clamp(min=0))
    return problem


def only_in_timed_graphs(plant: Plant) -> Plant:
    """The fault is there while the graphs that are timed are captured, not those that are checked;
    plant it with `captured_anew`."""

    def planted(worker: Any) -> AbstractContextManager[None]:
        def wrap(capture: Callable[[], None]) -> Callable[[], None]:
            def faulty() -> None:
                with plant(worker):
                    capture()

            return faulty

        return wrapped(worker.nwor_hook.graphs, "capture", wrap)

    return planted


def in_states(plant: Callable[[Any], AbstractContextManager[None]]) -> Plant:
    """A plant of `planted_states` as one of a worker."""
    return lambda worker: plant(worker.nwor_hook.states)
