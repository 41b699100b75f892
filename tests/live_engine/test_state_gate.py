"""The local gate of recurrent states, on real vLLM: sound cells pass, no planted fault does."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from engine_tools import prompts_of, tiny_spec, worker_of
from planted_cpu import wrapped
from planted_layers import check_a_batch
from torch import Tensor

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.plugin.states import WindowStates

pytestmark = pytest.mark.engine

PROMPTS = prompts_of([20, 30, 25, 41])

Plant = Callable[[WindowStates], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def engine(
    start_engine: Callable[..., VllmEngine], tmp_path_factory: pytest.TempPathFactory
) -> VllmEngine:
    pair = resolve_pair("tiny-states-mtp", cache_dir=tmp_path_factory.mktemp("pair"))
    arguments = json.dumps({"enforce_eager": True, "enable_prefix_caching": False})
    spec = tiny_spec(requests=4, kv_cache_gib=0.1, max_model_len=256, engine_args=arguments)
    return start_engine(pair, spec)


@pytest.mark.parametrize("mode", ["stage", "control"])
def test_sound_cells_are_within_rounding(engine: VllmEngine, mode: str) -> None:
    found = check_a_batch(engine, PROMPTS, mode)
    assert (found.verdict, found.reason) == (KvVerdict.WITHIN, None)
    assert found.states == 3
    assert found.windows == 2
    assert found.nearest is not None
    assert found.nearest < 1


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


def verify_changed(change: Callable[..., None]) -> Plant:
    """`change(layer's number, inputs)` before each verify, behind the gate's copies."""

    @contextmanager
    def plant(states: WindowStates) -> Iterator[None]:
        kernels = states._kernels
        numbers = {id(layer.layer.A_log): n for n, layer in enumerate(states.layers)}

        def faulty(mixed: Tensor, a: Tensor, b: Tensor, log_a: Tensor, *rest: Any,
                   **named: Any) -> None:  # fmt: skip
            mixed, a, b, rest_of = mixed.clone(), a.clone(), b.clone(), list(rest)
            change(numbers[id(log_a)], mixed, a, b, rest_of)
            kernels.verify(mixed, a, b, log_a, *rest_of, **named)

        states._kernels = kernels._replace(verify=faulty)
        try:
            yield
        finally:
            states._kernels = kernels

    return plant


def roll_requests(states: WindowStates) -> None:
    assert states._records is not None
    states._records.u[1] = states._records.u[1].roll(1, dims=0)


def one_heads_update(states: WindowStates) -> None:
    assert states._records is not None
    states._records.u[2, ..., 1, :] *= 1.001


def one_heads_gate(number: int, mixed: Tensor, a: Tensor, b: Tensor, rest: list[Any]) -> None:
    if number == 1:
        a[:, 2] += 0.01


def stale_source(number: int, mixed: Tensor, a: Tensor, b: Tensor, rest: list[Any]) -> None:
    """The state is read from the slot before."""
    rest[3] = (rest[3] - 1).clamp(min=1)  # dt_bias, state, indices, accepted


def token_short(number: int, mixed: Tensor, a: Tensor, b: Tensor, rest: list[Any]) -> None:
    """The window behind its convolution is one token late."""
    mixed.copy_(mixed.roll(1, dims=0))


@contextmanager
def never_committed(states: WindowStates) -> Iterator[None]:
    """The slot that the next window reads keeps what it had."""

    def wrap(commit_of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: lambda *counts: None

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
            return made(staged, tables._replace(indices=other), commit)

        return faulty

    states._commits.clear()
    with wrapped(states, "_made", wrap):
        yield
    states._commits.clear()


PLANTS: dict[str, Plant] = {
    "one too few": counts_changed(lambda counts: (counts - 1).clamp(min=1)),
    "one too many": counts_changed(lambda counts: (counts + 1).clamp(max=5)),
    "a rejected position": counts_changed(lambda counts: torch.full_like(counts, 5)),
    "another request's record": records_changed(roll_requests),
    "one head's update": records_changed(one_heads_update),
    "one head's gate": verify_changed(one_heads_gate),
    "a stale slot": verify_changed(stale_source),
    "never committed": never_committed,
    "a token short": verify_changed(token_short),
    "wrong group": groups_swapped,
}


@pytest.mark.parametrize("fault", PLANTS)
def test_no_planted_fault_passes(engine: VllmEngine, fault: str) -> None:
    states = worker_of(engine).nwor_hook.states
    with torch.inference_mode(), PLANTS[fault](states):
        found = check_a_batch(engine, PROMPTS)
    assert found.verdict is KvVerdict.BROKEN, found
    assert found.reason is not None
    assert "state" in found.reason or "outputs" in found.reason
