"""Faults planted into other parts of one worker than its commit: staging, attention, validation,
counts, the drafter, logits, and the capture of graphs.

Staging and attention are part of a captured graph, so those faults are planted before the capture
(`captured_anew`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from planted_commits import Plant, wrapped
from torch import Tensor

from nwor_bench.records.types import NworMode, ScvMode


def on_runners(v1: Plant, v2: Plant) -> Plant:
    """A fault that each runner has in another place."""
    return lambda worker: (v1 if worker.nwor_hook.name == "V1" else v2)(worker)


def in_states(plant: Callable[[Any], AbstractContextManager[None]]) -> Plant:
    """A plant of `planted_states` as one of a worker."""
    return lambda worker: plant(worker.nwor_hook.states)


def staged_in_layer_1(change: Callable[[Tensor, Tensor, Tensor], None]) -> Plant:
    """`change(key, value, rows)` in front of layer 1's staging; copies on the V1 runner, but V2's
    rows must lie where those of all layers do."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        hook = worker.nwor_hook

        def wrap(stage: Callable[..., str]) -> Callable[..., str]:
            def faulty(layer: int, key: Tensor, value: Tensor, rows: Tensor) -> str:
                if layer == 1:
                    if hook.name == "V1":
                        key, value = key.clone(), value.clone()
                    change(key, value, rows)
                return stage(layer, key, value, rows)

            return faulty

        return wrapped(hook.buffers, "stage", wrap)

    return plant


@staged_in_layer_1
def head_wrong_in_staging(key: Tensor, value: Tensor, rows: Tensor) -> None:
    """K of head 1 of layer 1 has the other sign where it is staged."""
    head = key[:, 1]
    head[rows] = -head[rows]


@staged_in_layer_1
def value_rounded_in_staging(key: Tensor, value: Tensor, rows: Tensor) -> None:
    """V of layer 1 is held in three bits of mantissa."""
    value[rows] = value[rows].to(torch.float8_e4m3fn).to(value.dtype)


def _hidden_on_cpu(place: Callable[[Tensor], Any]) -> Plant:
    """No query sees this position of those of its request's window."""

    def hide(group: Any, visible: Tensor) -> None:
        for request in group.staged.request.unique():
            positions = group.staged.position[group.staged.request == request]
            visible[request, :, :, place(positions)] = False

    return _visibility_changed(hide)


def _visibility_changed(change: Callable[[Any, Tensor], None]) -> Plant:
    """A plant over the V1 runner's attention: `change(group, visible)` for each staged group."""

    def hidden(group: Any) -> Any:
        if group.staged is None:
            return group
        visible = group.visible.clone()
        change(group, visible)
        return replace(group, visible=visible)

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v1 import cpu_attention as attention

        def wrap(attend: Callable[..., None]) -> Callable[..., None]:
            def faulty(query: Any, cache: Any, plan: Any, *rest: Any) -> None:
                if rest[-1] is not None:  # a window is staged
                    plan = [hidden(group) for group in plan]
                attend(query, cache, plan, *rest)

            return faulty

        return wrapped(attention, "verify_attention_reference", wrap)

    return plant


def _hidden_on_gpu(hide: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """`hide(starts, ends)` gives the staged row of each request that the V2 runner's attention
    reads as zeros, for all that it can then find of it."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        from nwor_bench.plugin.runner_v2 import attention

        def wrap(attend: Callable[..., None]) -> Callable[..., None]:
            def faulty(step: Any, *rest: Any) -> None:
                starts, ends = step.requests.staged_start, step.requests.staged_end
                rows = hide(starts.long(), ends.long()).clamp(0, step.key.shape[0] - 1)
                key, value = (each.index_fill(0, rows, 0) for each in (step.key, step.value))
                attend(step._replace(key=key, value=value), *rest)

            return faulty

        return wrapped(attention, "verify_attention_triton", wrap)

    return plant


last_row_missed = on_runners(_hidden_on_cpu(Tensor.max), _hidden_on_gpu(lambda _, ends: ends - 1))
first_row_missed = on_runners(_hidden_on_cpu(Tensor.min), _hidden_on_gpu(lambda starts, _: starts))


@_visibility_changed
def own_row_missed(group: Any, visible: Tensor) -> None:
    """No draft sees itself."""
    place = torch.arange(group.visible.shape[-1])
    last_seen = (group.visible[:, 0] * place).amax(-1)  # a query's own position
    for request, position in zip(group.staged.request, group.staged.position, strict=True):
        query = (last_seen[request] == position) & group.is_query[request]
        visible[request, :, query, position] = False


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
    if worker.nwor_hook.name == "V1":
        from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

        return wrapped(ReferenceCPUAttentionImpl, "_open_staging", lambda _: lambda self, *_: None)
    from nwor_bench.plugin.runner_v2 import attention

    return wrapped(attention.StagingAttention, "_verify", lambda _: attend_to_the_cache)


def drafter_not_written(worker: Any) -> AbstractContextManager[None]:
    """While NWOR stages, no layer of the V1 runner's drafter writes its K/V."""
    from nwor_bench.plugin.runner_v1.cpu_attention import ReferenceCPUAttentionImpl

    hook = worker.nwor_hook
    context = hook.runner.compilation_config.static_forward_context
    drafter = [context[name].impl for name in hook.drafter_layers]

    def wrap(write: Callable[..., None]) -> Callable[..., None]:
        def faulty(self: Any, *rest: Any) -> None:
            if self not in drafter or hook.nwor_mode is not NworMode.STAGE:
                write(self, *rest)

        return faulty

    return wrapped(ReferenceCPUAttentionImpl, "do_kv_cache_update", wrap)


def _direct_slots(change: Callable[[Any], Tensor]) -> Plant:
    """A plant over what the V1 runner writes at once: `change(batch)` gives the direct slots."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        def wrap(begin: Callable[..., None]) -> Callable[..., None]:
            return lambda batch, **named: begin(replace(batch, direct_slots=change(batch)), **named)

        return wrapped(worker.nwor_hook.window, "begin", wrap)

    return plant


@_direct_slots
def certain_token_left_out(batch: Any) -> Tensor:
    """The certain token before a request's drafts is left out of the cache."""
    slots, at = batch.direct_slots.clone(), 0
    for drafts in batch.num_draft_tokens:
        if drafts:
            slots[batch.rows[at] - 1] = -1
        at += drafts
    return slots


@_direct_slots
def _drafts_written_at_once(batch: Any) -> Tensor:
    """Every draft is written at once, as in mode off, and counted as staged."""
    slots = batch.direct_slots.clone()
    slots[batch.rows] = batch.slots
    return slots


def _drafts_written_before_the_decision(worker: Any) -> AbstractContextManager[None]:
    """Every draft is written before the window is decided, and counted as staged (V2 runner)."""
    window, staging = worker.nwor_hook.window, worker.nwor_hook.buffers

    def wrap(accept: Callable[..., bool]) -> Callable[..., bool]:
        def faulty(*args: Any) -> bool:
            staging.write_directly(list(range(staging.num_layers)), window.batch.slots)
            return accept(*args)

        return faulty

    return wrapped(window, "accept", wrap)


written_directly_in_secret = on_runners(
    _drafts_written_at_once, _drafts_written_before_the_decision
)


def validation_changed(change: Callable[[Any, tuple[int, ...]], Any], mode: Any = None) -> Plant:
    """A plant over the V1 runner's validation: `change(found, drafts)`; not in this SCV mode."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        validator = worker.nwor_hook.validator

        def wrap(validate: Callable[..., Any]) -> Callable[..., Any]:
            def faulty(ids: Any, drafts: tuple[int, ...]) -> Any:
                found = validate(ids, drafts)
                return found if validator.mode is mode else change(found, drafts)

            return faulty

        return wrapped(validator, "validate", wrap)

    return plant


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


accepts_one_too_many = validation_changed(_accept_one_more)
accepts_one_too_many_in_scv_graph = validation_changed(_accept_one_more, ScvMode.OFF)


@validation_changed
def accepts_one_less(found: Any, drafts: tuple[int, ...]) -> Any:
    """One accepted draft less, if there is one."""
    if not sum(found.num_accepted):
        return found
    counts, accepted = list(found.num_accepted), found.accepted.clone()
    counts[counts.index(max(counts))] -= 1
    accepted[accepted.nonzero()[-1]] = False
    return replace(found, num_accepted=counts, accepted=accepted)


def counts_changed(change: Callable[[Any, int], Any]) -> Plant:
    """A plant over the record of each window: `change(counts, layers)` is recorded instead."""

    def plant(worker: Any) -> AbstractContextManager[None]:
        hook = worker.nwor_hook

        def wrap(add: Callable[..., None]) -> Callable[..., None]:
            return lambda counts, *given: add(change(counts, len(hook.target_layers)), *given)

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


@counts_changed
def counts_one_less(counts: Any, layers: int) -> Any:
    """One staged token less than there were is recorded."""
    return replace(counts, staged_tokens=counts.staged_tokens - 1)


def second_best(worker: Any) -> AbstractContextManager[None]:
    """While NWOR stages, the second-best token is taken wherever its gap is under 0.3 nats."""
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
