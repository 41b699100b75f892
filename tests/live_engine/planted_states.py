"""Faults of recurrent states that the gate must see, planted into either runner: the local gate
every one, the end-to-end gate those that move a state by more than roundings do."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from engine_tools import run_cell, worker_of
from kv_gate_tools import OFF, answer_of
from planted_commits import context_lengths, wrapped
from planted_layers import check_a_batch
from torch import Tensor

from nwor_bench.analysis.parity.kv import KvVerdict, StateResult
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.plugin.states import WindowStates
from nwor_bench.records.types import Cell, NworMode, ScvMode
from nwor_bench.run.gate.kv import KvGate
from nwor_kernels.gated_delta.records import WindowInputs

Plant = Callable[[WindowStates], AbstractContextManager[None]]


def counts_changed(change: Callable[[Tensor], Tensor]) -> Plant:
    """The commit is given other counts."""

    def plant(states: WindowStates) -> AbstractContextManager[None]:
        return wrapped(states, "commit", lambda commit: lambda counts: commit(change(counts)))

    return plant


def records_changed(change: Callable[[WindowStates], None]) -> Plant:
    """The records are changed before the commit."""

    def plant(states: WindowStates) -> AbstractContextManager[None]:
        def wrap(commit: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
            def faulty(counts: Tensor) -> Any:
                change(states)
                return commit(counts)

            return faulty

        return wrapped(states, "commit", wrap)

    return plant


def verify_changed(change: Callable[[int, WindowInputs], WindowInputs]) -> Plant:
    """`change(layer's number, inputs)` gives each verify its inputs, behind the gate's copies."""

    @contextmanager
    def plant(states: WindowStates) -> Iterator[None]:
        kernels = states._kernels
        numbers = {id(layer.layer.A_log): n for n, layer in enumerate(states.layers)}

        def faulty(inputs: WindowInputs, *rest: Any, **named: Any) -> None:
            kernels.verify(change(numbers[id(inputs.A_log)], inputs), *rest, **named)

        states._kernels = kernels._replace(verify=faulty)
        try:
            yield
        finally:
            states._kernels = kernels

    return plant


def wrapper_changed(change: Callable[[Tensor, Tensor, Tensor], None]) -> Plant:
    """`change(mixed, a, b)` in one layer's wrapper, in front of everything that is ours there."""

    def plant(states: WindowStates) -> AbstractContextManager[None]:
        def wrap(verify: Callable[..., None]) -> Callable[..., None]:
            def faulty(number: int, mixed: Tensor, a: Tensor, b: Tensor, *rest: Any,
                       **named: Any) -> None:  # fmt: skip
                mixed, a, b = mixed.clone(), a.clone(), b.clone()
                if number == 1:
                    change(mixed, a, b)
                verify(number, mixed, a, b, *rest, **named)

            return faulty

        return wrapped(states, "verify", wrap)

    return plant


def one_heads_beta(mixed: Tensor, a: Tensor, b: Tensor) -> None:
    """Beta of one head is 0.02 too large where it is near a half."""
    b[:, 1] += 0.08


def roll_requests(states: WindowStates) -> None:
    assert states._records is not None
    states._records.u[1] = states._records.u[1].roll(1, dims=0)


def one_heads_update(states: WindowStates) -> None:
    assert states._records is not None
    states._records.u[2, ..., 1, :] *= 1.001


def one_heads_gate(number: int, inputs: WindowInputs) -> WindowInputs:
    decay = inputs.a.clone()
    decay[:, 2] += 0.01 * (number == 1)
    return inputs._replace(a=decay)


def stale_source(number: int, inputs: WindowInputs) -> WindowInputs:
    """The state is read from the slot before."""
    return inputs._replace(accepted=(inputs.accepted - 1).clamp(min=1))


def token_short(number: int, inputs: WindowInputs) -> WindowInputs:
    """The window behind its convolution is one token late."""
    return inputs._replace(mixed=inputs.mixed.roll(1, dims=0))


@contextmanager
def never_committed(states: WindowStates) -> Iterator[None]:
    """The slot that the next window reads keeps what it had."""

    def wrap(commit_of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: lambda *counts: None

    with wrapped(states, "_commit_of", wrap):
        yield


@contextmanager
def rejected_state_committed(states: WindowStates) -> Iterator[None]:
    """In one layer the next window reads the state behind the first rejected draft."""
    layer = states.layers[1]

    def wrap(commit_of: Callable[..., Any]) -> Callable[..., Any]:
        def faulty_of(staged: Any, tables: Any) -> Any:
            commit, indices = commit_of(staged, tables), tables.indices[layer.group].long()

            def faulty(accepted: Tensor, committed: Tensor) -> None:
                places = [(each.state, tables.indices[each.group].long()) for each in states.layers]
                before = [state[slots] for state, slots in places]
                commit(accepted, (committed + 1).clamp(max=indices.shape[1]))
                column = committed.long()[:, None]
                behind = indices.gather(1, column.clamp(max=indices.shape[1] - 1)).flatten()
                rejected = layer.state[behind]
                for (state, slots), kept in zip(places, before, strict=True):
                    state[slots] = kept
                commit(accepted, committed)
                kept = indices.gather(1, column - 1).flatten()
                some = (column.flatten() < indices.shape[1]).view(-1, 1, 1, 1)
                layer.state[kept] = rejected.where(some, layer.state[kept])

            return faulty

        return faulty_of

    with wrapped(states, "_commit_of", wrap):
        yield


@contextmanager
def groups_swapped(states: WindowStates) -> Iterator[None]:
    """Layers are committed to the slots of another group, or of another request."""

    def wrap(made: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(staged: Any, tables: Any, commit: Any) -> Any:
            indices = tables.indices
            other = indices[1:] + indices[:1]
            if len(indices) == 1:
                other = (indices[0].roll(1, dims=0),)
            return made(staged, replace(tables, indices=other), commit)

        return faulty

    states._commits.clear()
    with wrapped(states, "_made", wrap):
        yield
    states._commits.clear()


def convolution_short(states: WindowStates) -> AbstractContextManager[None]:
    """The convolution goes on from one token before the last accepted one."""
    if states.layers[0].state.device.type != "cpu":
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen

        def wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def update(*given: Any, **named: Any) -> Tensor:
                if named.get("num_accepted_tokens") is not None:
                    accepted = named["num_accepted_tokens"]
                    named["num_accepted_tokens"] = (accepted - 1).clamp(min=1)
                return original(*given, **named)

            return update

        return wrapped(qwen, "causal_conv1d_update", wrap)

    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def wrap_cpu(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor,
                    kept: Tensor, *rest: Any) -> Tensor:  # fmt: skip
            slots = metadata.spec_state_indices_tensor[: metadata.num_spec_decodes, 0].long()
            later = metadata.num_accepted_tokens[: len(slots)] > 1
            kept[slots[later]] = kept[slots[later]].roll(1, dims=-1)
            return original(layer, metadata, mixed, b, a, kept, *rest)

        return forward

    return wrapped(gdn_attention, "_spec_forward", wrap_cpu)


LATE = 50
"""Tokens that no context has in the windows that the local gate checks."""


def scaled_at_long_context(worker: Any) -> AbstractContextManager[None]:
    """The last layer's state is 2 % too large behind a context of more than `LATE` tokens."""
    hook, states = worker.nwor_hook, worker.nwor_hook.states

    def wrap(commit: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def faulty(counts: Tensor) -> Any:
            tables = (states._tables or states._collected()) if states._staged else None
            outcome = commit(counts)
            if tables is not None:
                layer, column = states.layers[-1], counts.long().clamp(min=1)[:, None] - 1
                slots = tables.indices[layer.group].long().gather(1, column).flatten()
                late = context_lengths(hook)[: len(slots)].to(slots.device) > LATE
                layer.state[slots[late]] *= 1.02
            return outcome

        return faulty

    return wrapped(states, "commit", wrap)


PLANTS: dict[str, Plant] = {
    "one too few": counts_changed(lambda counts: (counts - 1).clamp(min=1)),
    "one too many": counts_changed(lambda counts: (counts + 1).clamp(max=5)),
    "a rejected draft's state": rejected_state_committed,
    "another request's record": records_changed(roll_requests),
    "one head's update": records_changed(one_heads_update),
    "one head's gate": verify_changed(one_heads_gate),
    "one head's beta in front of the trace": wrapper_changed(one_heads_beta),
    "a stale slot": verify_changed(stale_source),
    "never committed": never_committed,
    "a token short": verify_changed(token_short),
    "wrong group": groups_swapped,
    "convolution a token short": convolution_short,
}


@contextmanager
def others_ring(states: WindowStates) -> Iterator[None]:
    """Each request's tokens are committed to the ring of the one before it."""
    assert states.rings is not None
    of_row = states.rings.records.of_row

    def wrap(commit: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def faulty(counts: Tensor) -> Any:
            kept, own = of_row.clone(), of_row > 0
            of_row[own] = of_row[own].roll(1)
            outcome = commit(counts)
            of_row.copy_(kept)
            return outcome

        return faulty

    with wrapped(states, "commit", wrap):
        yield


def cursor_too_far(states: WindowStates) -> AbstractContextManager[None]:
    """One row more is live than was committed."""

    def wrap(commit: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def faulty(counts: Tensor) -> Any:
            assert states.rings is not None
            outcome, cursors = commit(counts), states.rings.records.cursors
            cursors[:, 0] += (cursors[:, 0] > 0) & (cursors[:, 0] < 11)
            return outcome

        return faulty

    return wrapped(states, "commit", wrap)


def flush_skipped(states: WindowStates) -> AbstractContextManager[None]:
    """A full ring is emptied, and its state is not written."""

    def wrap(commit_of: Callable[..., Any]) -> Callable[..., Any]:
        def faulty_of(*given: Any) -> Any:
            def faulty(*counts: Any) -> None:
                kept = [layer.state.clone() for layer in states.layers]
                commit_of(*given)(*counts)
                for layer, state in zip(states.layers, kept, strict=True):
                    layer.state.copy_(state)

            return faulty

        return faulty_of

    return wrapped(states, "_commit_of", wrap)


def ring_not_zeroed(states: WindowStates) -> AbstractContextManager[None]:
    """A request begins with the live rows of the one that had its ring before."""
    assert states.rings is not None
    cursors = states.rings.records.cursors

    def wrap(place: Callable[..., None]) -> Callable[..., None]:
        def faulty(req_ids: Any) -> None:
            kept = cursors.clone()
            place(req_ids)
            cursors.copy_(kept)

        return faulty

    return wrapped(states.rings, "place", wrap)


RING_PLANTS: dict[str, Plant] = {
    "cursor one too far": cursor_too_far,
    "another request's ring": others_ring,
    "rejected row kept": counts_changed(lambda counts: (counts + 1).clamp(max=5)),
    "flush skipped": flush_skipped,
    "ring not zeroed": ring_not_zeroed,
}
"""Faults of rings of records. The local gate does not see the last: its states begin with the same
rows. The debug check sees all but the skipped flush."""


CASES = ("sound stage", "sound control", *PLANTS)

IN_WRAPPER = "one head's beta in front of the trace"

SUBTLE = ("one head's update", "one head's gate", IN_WRAPPER, "convolution a token short")
"""End to end these need not be seen: they move a state by 0.1 to 4 %, less than mode off's states
may differ by from themselves; the last is in mode off too."""

IN_FORWARD = (
    IN_WRAPPER,
    "a stale slot",
    "a token short",
    "convolution a token short",
)
"""Planted into the forward: a graph that was captured before does not have them."""

END_TO_END = ("sound stage", "sound control", "a rejected draft's state")


def check_case(engine: VllmEngine, prompts: list[list[int]], case: str, layers: int) -> None:
    """A sound batch passes with all `layers` that have states; one with a planted fault does not,
    because of its states or outputs."""
    states, plants = worker_of(engine).nwor_hook.states, PLANTS | RING_PLANTS
    windows, tokens = (8, 48) if states.rings else (2, 16)
    if case in plants:
        with torch.inference_mode(), plants[case](states):
            found = check_a_batch(engine, prompts, tokens=tokens)
        assert found.verdict is KvVerdict.BROKEN, found
        assert found.reason is not None
        if case.startswith("convolution"):
            assert "convolution states" in found.reason, found.reason
        else:
            assert "recurrent state" in found.reason or "outputs" in found.reason
        return
    found = check_a_batch(engine, prompts, case.removeprefix("sound "), tokens=tokens)
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert (found.states, found.convolutions, found.windows) == (layers, layers, windows)
    assert found.state_requests == len(prompts)
    assert found.nearest is not None
    assert found.nearest < 1


def check_end_to_end(
    engine: VllmEngine, prompts: list[list[int]], case: str, layers: int
) -> StateResult:
    """Behind a sound batch the states of every request are mode off's; a planted fault is named."""
    plant = PLANTS.get(case)
    nwor = NworMode("stage" if plant else case.removeprefix("sound "))
    cell = Cell("tiny", nwor, ScvMode.OFF)
    states = worker_of(engine).nwor_hook.states
    gate = KvGate(engine.kv_cache(), engine.set_modes, engine.status(), OFF)
    with gate.watching():
        stock = run_cell(engine, "off", "off", prompts, 40)
        assert gate.check(OFF, prompts, answer_of(stock)) is None
        with torch.inference_mode(), plant(states) if plant else nullcontext():
            staged = run_cell(engine, nwor, "off", prompts, 40)
        result = gate.check(cell, prompts, answer_of(staged, nwor))
    assert result is not None
    found = result.states
    assert found is not None
    assert (found.sampled, found.requests, found.layers) == (len(prompts), len(prompts), layers)
    assert found.states == layers * len(prompts)
    if plant:
        assert found.verdict is KvVerdict.BROKEN, found
        assert (found.reason or "").startswith("states: layer ")
    else:
        assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
        assert found.finding is not None
        assert found.finding.ratio < 1
    return found
