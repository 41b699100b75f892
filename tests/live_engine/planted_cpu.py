"""Faults planted into the staging of one worker on the CPU (vLLM's V1 runner).

Each takes the worker and is a context manager: the fault is gone when it ends.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

Plant = Callable[[Any], AbstractContextManager[None]]


@contextmanager
def wrapped(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """With `owner.name` replaced by `make(original)`."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def commit_wrapped(make: Callable[[Any, Callable[..., str]], Callable[..., str]]) -> Plant:
    """A plant over `StagingBuffers.commit`: `make(buffers, commit)` gives the faulty one."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        buffers = worker.nwor_hook.buffers
        return wrapped(buffers, "commit", lambda commit: make(buffers, commit))

    return plant


def _last_layer(buffers: Any) -> int:
    return int(buffers.num_layers) - 1


def _at(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Block and offset of each slot."""
    return slots // cache.shape[2], slots % cache.shape[2]


@commit_wrapped
def head_wrong_in_commit(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """K of head 1 of layer 1 has the other sign in the cache."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        problem = commit(slots, accepted)
        cache, width = buffers.layers[1].kv_cache, buffers.layers[1].head_dim
        block, offset = _at(cache, slots[accepted])
        cache[block, 1, offset, :width] *= -1
        return problem

    return faulty


@commit_wrapped
def last_layer_one_slot_on(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """The last layer's rows land one slot further; all other layers are right."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        last = _last_layer(buffers)
        kept = buffers.layers[last].kv_cache.clone()
        problem = commit(slots, accepted)
        cache = buffers.layers[last].kv_cache
        cache.copy_(kept)
        further = (slots[accepted] + 1).clamp(max=cache.shape[0] * cache.shape[2] - 1)
        block, offset = _at(cache, further)
        rows = accepted.nonzero()[:, 0]
        cache[block, :, offset] = torch.cat([buffers.key[last], buffers.value[last]], -1)[rows]
        return problem

    return faulty


@commit_wrapped
def one_too_few(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """The last accepted draft of each window is not written."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        fewer = accepted.clone()
        fewer[accepted.nonzero()[-1:]] = False
        return commit(slots, fewer)

    return faulty


@commit_wrapped
def rejected_committed(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """The rejected drafts are written, and the accepted ones are not."""
    return lambda slots, accepted: commit(slots, ~accepted)


@commit_wrapped
def layer_skipped(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """Layer 1 is left out."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        kept = buffers.layers[1].kv_cache.clone()
        problem = commit(slots, accepted)
        buffers.layers[1].kv_cache.copy_(kept)
        return problem

    return faulty


@commit_wrapped
def values_of_two_layers_swapped(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """Layers 0 and 1 get each other's V."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        buffers.value[:2] = reversed(buffers.value[:2])
        return commit(slots, accepted)

    return faulty


@commit_wrapped
def key_and_value_swapped(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """Layer 1 gets V where K belongs, and K where V belongs."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        buffers.key[1], buffers.value[1] = buffers.value[1], buffers.key[1]
        return commit(slots, accepted)

    return faulty


@commit_wrapped
def commit_after_the_next_begin(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """A window's slots are written one window later, from the rows that are staged by then."""
    waiting: list[tuple[Tensor, Tensor]] = []

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        waiting.append((slots.clone(), accepted.clone()))
        if len(waiting) < 2:
            return ""
        late_slots, late_accepted = waiting.pop(0)
        rows = min(len(late_slots), len(slots))
        late = torch.zeros_like(accepted)
        late[:rows] = late_accepted[:rows]
        moved = slots.clone()
        moved[:rows] = late_slots[:rows]
        return commit(moved, late)

    return faulty


@commit_wrapped
def slots_of_two_requests_swapped(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
    """The first two requests of a window get each other's rows."""

    def faulty(slots: Tensor, accepted: Tensor) -> str:
        drafts = 4
        if len(slots) >= 2 * drafts:
            slots = torch.cat([slots[drafts : 2 * drafts], slots[:drafts], slots[2 * drafts :]])
        return commit(slots, accepted)

    return faulty


def stage_wrapped(make: Callable[[Any, int, int], None]) -> Plant:
    """A plant that changes what is staged: `make(buffers, layer, rows)` after each layer."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        buffers = worker.nwor_hook.buffers

        def wrap(stage: Callable[..., str]) -> Callable[..., str]:
            def faulty(layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
                problem = stage(layer, key, value, rows)
                make(buffers, layer, len(rows))
                return problem

            return faulty

        return wrapped(buffers, "stage", wrap)

    return plant


@stage_wrapped
def head_wrong_in_staging(buffers: Any, layer: int, rows: int) -> None:
    """K of head 1 of layer 1 has the other sign where it is staged."""
    if layer == 1:
        buffers.key[1][:rows, 1] *= -1


@stage_wrapped
def value_rounded_to_fp8(buffers: Any, layer: int, rows: int) -> None:
    """V of layer 1 is held in three bits of mantissa."""
    if layer == 1:
        rounded = buffers.value[1][:rows].to(torch.float8_e4m3fn)
        buffers.value[1][:rows] = rounded.to(buffers.value[1].dtype)


def attention_wrapped(change: Callable[..., None]) -> Plant:
    """A plant over attention while a window is staged: `change(group, hide)` for each group.

    `hide(request, query, position)` takes a position from what a query sees.
    """

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v1 import cpu_attention as attention

        def wrap(attend: Callable[..., None]) -> Callable[..., None]:
            def faulty(
                query: Any, cache: Any, plan: Any, output: Any, scores: Any, staged: Any
            ) -> None:
                if staged is not None:
                    plan = [_hidden(group, change) for group in plan]
                attend(query, cache, plan, output, scores, staged)

            return faulty

        return wrapped(attention, "verify_attention_reference", wrap)

    return plant


def _hidden(group: Any, change: Callable[..., None]) -> Any:
    if group.staged is None:
        return group
    visible = group.visible.clone()
    change(group, visible)
    return replace(group, visible=visible)


@attention_wrapped
def last_row_missed(group: Any, visible: Tensor) -> None:
    """No query sees the last row of its request's window."""
    for request in group.staged.request.unique():
        own = group.staged.position[group.staged.request == request]
        visible[request, :, :, own.max()] = False


@attention_wrapped
def first_row_missed(group: Any, visible: Tensor) -> None:
    """No query sees the first draft of its request's window."""
    for request in group.staged.request.unique():
        own = group.staged.position[group.staged.request == request]
        visible[request, :, :, own.min()] = False


@attention_wrapped
def own_row_missed(group: Any, visible: Tensor) -> None:
    """No draft sees itself."""
    place = torch.arange(group.visible.shape[-1])
    last_seen = (group.visible[:, 0] * place).amax(-1)  # a query's own position
    for request, position in zip(group.staged.request, group.staged.position, strict=True):
        query = (last_seen[request] == position) & group.is_query[request]
        visible[request, :, query, position] = False


def stale_attention(worker: Any) -> AbstractContextManager[None]:
    """The write is skipped and attention reads only the cache: the first published NWOR."""
    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

    return wrapped(
        ReferenceCPUAttentionImpl, "_open_staging", lambda original: lambda self, *_: None
    )


def drafter_not_written(worker: Any) -> AbstractContextManager[None]:
    """While NWOR stages, no layer of the drafter writes its K/V."""
    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl
    from nwor_bench.records.types import NworMode

    hook = worker.nwor_hook
    context = hook.runner.compilation_config.static_forward_context
    drafter = [context[name].impl for name in hook.drafter_layers]

    def wrap(write: Callable[..., None]) -> Callable[..., None]:
        def faulty(self: Any, *rest: Any) -> None:
            if self not in drafter or hook.nwor_mode is not NworMode.STAGE:
                write(self, *rest)

        return faulty

    return wrapped(ReferenceCPUAttentionImpl, "do_kv_cache_update", wrap)


def first_token_not_written(worker: Any) -> AbstractContextManager[None]:
    """The certain token before a request's drafts is left out of the cache."""
    window = worker.nwor_hook.window

    def wrap(begin: Callable[..., None]) -> Callable[..., None]:
        def faulty(batch: Any, **named: Any) -> None:
            slots, at = batch.direct_slots.clone(), 0
            for drafts in batch.num_draft_tokens:
                if drafts:
                    slots[batch.rows[at] - 1] = -1
                at += drafts
            begin(replace(batch, direct_slots=slots), **named)

        return faulty

    return wrapped(window, "begin", wrap)


def written_directly_in_secret(worker: Any) -> AbstractContextManager[None]:
    """Every draft is written at once, as in mode off, and counted as staged."""
    window = worker.nwor_hook.window

    def wrap(begin: Callable[..., None]) -> Callable[..., None]:
        def faulty(batch: Any, **named: Any) -> None:
            slots = batch.direct_slots.clone()
            slots[batch.rows] = batch.slots
            begin(replace(batch, direct_slots=slots), **named)

        return faulty

    return wrapped(window, "begin", wrap)


def _accept_one_more(found: Any, drafts: tuple[int, ...]) -> Any:
    """One draft more where one was rejected, in the mask and in the counts."""
    counts, accepted, at = list(found.num_accepted), found.accepted.clone(), 0
    for request, number in enumerate(drafts):
        if counts[request] < number:
            accepted[at + counts[request]] = True
            counts[request] += 1
            break
        at += number
    return replace(found, num_accepted=counts, accepted=accepted)


def accepts_one_too_many(worker: Any) -> AbstractContextManager[None]:
    """Validation takes a rejected draft for an accepted one, in every SCV mode."""
    validator = worker.nwor_hook.validator

    def wrap(validate: Callable[..., Any]) -> Callable[..., Any]:
        return lambda ids, drafts: _accept_one_more(validate(ids, drafts), drafts)

    return wrapped(validator, "validate", wrap)


def accepts_one_too_many_in_scv_graph(worker: Any) -> AbstractContextManager[None]:
    """Validation takes a rejected draft for an accepted one, in the SCV modes of a device only."""
    from nwor_bench.records.types import ScvMode

    validator = worker.nwor_hook.validator

    def wrap(validate: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(ids: Any, drafts: tuple[int, ...]) -> Any:
            found = validate(ids, drafts)
            return found if validator.mode is ScvMode.OFF else _accept_one_more(found, drafts)

        return faulty

    return wrapped(validator, "validate", wrap)


def counts_changed(change: Callable[[Any, int], Any]) -> Plant:
    """A plant over the record of each window: `change(counts, layers)` is recorded instead."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        hook = worker.nwor_hook

        def wrap(add: Callable[..., None]) -> Callable[..., None]:
            def faulty(counts: Any, *given: Any) -> None:
                add(change(counts, len(hook.target_layers)), *given)

            return faulty

        return wrapped(hook.accumulator, "add", wrap)

    return plant


STAGE_COUNTS = ("staged_tokens", "committed_tokens", "rejected_tokens", "stage_operations")


@counts_changed
def counters_doubled(counts: Any, layers: int) -> Any:
    """Every staged token is counted twice, consistently."""
    return replace(counts, **{name: 2 * getattr(counts, name) for name in STAGE_COUNTS})


@counts_changed
def counted_in_each_layer(counts: Any, layers: int) -> Any:
    """A staged token is counted once a layer."""
    return replace(counts, **{name: layers * getattr(counts, name) for name in STAGE_COUNTS[:3]})


def at_each_switch_to_off(hook: Any, damage: Callable[[], None]) -> AbstractContextManager[None]:
    """With `damage` done each time that off runs behind a cell that stages."""
    from nwor_bench.records.types import NworMode

    def wrap(switch_to: Callable[..., None]) -> Callable[..., None]:
        def faulty(nwor_mode: NworMode, scv_mode: Any) -> None:
            if hook.nwor_mode is NworMode.STAGE and nwor_mode is NworMode.OFF:
                damage()
            switch_to(nwor_mode, scv_mode)

        return faulty

    return wrapped(hook, "switch_to", wrap)


def switch_fault(damage: Callable[[Any, Tensor], None]) -> Plant:
    """`damage(buffers, slots)` of the last commit's slots, at each switch from stage to off."""

    @contextmanager
    def plant(worker: Any) -> Iterator[None]:
        hook, last = worker.nwor_hook, []

        def remember(commit: Callable[..., str]) -> Callable[..., str]:
            def noted(slots: Tensor, accepted: Tensor) -> str:
                last[:] = [slots[accepted].clone()]
                return commit(slots, accepted)

            return noted

        def harm() -> None:
            for slots in last:
                damage(hook.buffers, slots)

        with wrapped(hook.buffers, "commit", remember), at_each_switch_to_off(hook, harm):
            yield

    return plant


@switch_fault
def rows_lost_at_a_switch(buffers: Any, slots: Tensor) -> None:
    """The last commit's rows are zero in every layer."""
    for cache in [layer.kv_cache for layer in buffers.layers]:
        block, offset = _at(cache, slots)
        cache[block, :, offset] = 0


@switch_fault
def one_row_lost_at_a_switch(buffers: Any, slots: Tensor) -> None:
    """The last commit's first row is 1 throughout in layer 0."""
    cache = buffers.layers[0].kv_cache
    block, offset = _at(cache, slots[:1])
    cache[block, :, offset] = 1


def second_best(worker: Any) -> AbstractContextManager[None]:
    """While NWOR stages, the second-best token is taken wherever its gap is under 0.3 nats; on
    either runner."""
    from nwor_bench.records.types import NworMode

    hook = worker.nwor_hook

    def wrap(compute: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*given: Any, **named: Any) -> Any:
            logits = compute(*given, **named)
            if logits is None or hook.nwor_mode is not NworMode.STAGE:
                return logits
            best = logits.argmax(-1, keepdim=True)
            first = logits.gather(1, best)
            second = logits.scatter(1, best, float("-inf")).amax(-1, keepdim=True)
            lower = torch.where(first - second < 0.3, second - 1, first)
            return logits.scatter(1, best, lower)

        return faulty

    return wrapped(hook.runner.model, "compute_logits", wrap)


UNRELATED = 16
"""Positions that get unrelated K/V."""

LONG = 24
"""Positions from which a context counts as long: some of the prompts' lengths are beyond it."""


def value_wrong_at_long_context(worker: Any) -> AbstractContextManager[None]:
    """V of one head is 1 % too large in the rows of requests that have a long context."""
    runner = worker.nwor_hook.runner

    @commit_wrapped
    def plant(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
        def faulty(slots: Tensor, accepted: Tensor) -> str:
            counts = worker.nwor_hook.window.batch.num_draft_tokens
            lengths = runner.seq_lens[: len(counts)].cpu()
            of_row = lengths.repeat_interleave(torch.tensor(counts))
            rows = (of_row > LONG).nonzero()[:, 0]
            buffers.value[1][rows, 1] *= 1.01
            return commit(slots, accepted)

        return faulty

    return plant(worker)


def unrelated_rows(worker: Any) -> AbstractContextManager[None]:
    """16 positions of one request get unrelated K/V in every layer, once in each SCV mode."""
    of_mode: dict[Any, list[int]] = {}

    @commit_wrapped
    def plant(buffers: Any, commit: Callable[..., str]) -> Callable[..., str]:
        def faulty(slots: Tensor, accepted: Tensor) -> str:
            problem = commit(slots, accepted)
            first = worker.nwor_hook.window.batch.num_draft_tokens[0]
            kept = of_mode.setdefault(worker.nwor_hook.validator.mode, [])
            if len(kept) < UNRELATED:
                kept.extend(slots[:first][accepted[:first]].tolist())
                if len(kept) >= UNRELATED:
                    for layer in buffers.layers:
                        replace_rows(layer.kv_cache, torch.tensor(kept[:UNRELATED]))
            return problem

        return faulty

    return plant(worker)


def replace_rows(cache: Tensor, slots: Tensor) -> None:
    """Other values of the same size at these slots."""
    at = slots // cache.shape[2], slice(None), slots % cache.shape[2]
    rows = cache[at].float()
    signs = torch.rand(rows.shape, generator=torch.Generator().manual_seed(3)).to(rows) - 0.5
    cache[at] = (rows.flip(-1) * signs.sign()).to(cache.dtype)
