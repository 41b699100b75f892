"""What tests plant in every worker process, or read from it, by `collective_rpc` of a function."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from planted_commits import Commit, Plant, commit_replaced, first_accepted_dropped, wrapped
from planted_parts import accepts_one_less, counts_one_less

from nwor_bench.engine.engine import VllmEngine

FAULT = "planted fault"


def on_ranks(engine: VllmEngine, function: Any, *args: Any) -> list[Any]:
    """Call `function(worker, *args)` in every worker; the answers in the ranks' order."""
    return list(engine._llm.collective_rpc(function, args=args))


@contextmanager
def planted(engine: VllmEngine, name: str, rank: int) -> Iterator[None]:
    """With one of PLANTS on one rank."""
    on_ranks(engine, _plant, name, rank)
    try:
        yield
    finally:
        on_ranks(engine, _heal)


def _plant(worker: Any, name: str, rank: int) -> None:
    if worker.rank == rank:
        worker.planted = PLANTS[name](worker)
        worker.planted.__enter__()


def _heal(worker: Any) -> None:
    found = worker.__dict__.pop("planted", None)
    if found is not None:
        found.__exit__(None, None, None)


def staging_fails(worker: Any) -> AbstractContextManager[None]:
    """Layer 1 cannot be staged."""

    def wrap(stage: Callable[..., Any]) -> Callable[..., Any]:
        def broken(layer: int, *args: Any) -> Any:
            if layer == 1:
                raise RuntimeError(FAULT)
            return stage(layer, *args)

        return broken

    return wrapped(worker.nwor_hook.buffers, "stage", wrap)


@commit_replaced
def commit_fails(window: Commit) -> str:
    """Nothing can be committed."""
    raise RuntimeError(FAULT)


@commit_replaced
def commit_is_refused(window: Commit) -> str:
    """The device refuses every commit of this rank, which reads its counts after four steps."""
    from nwor_bench.plugin import late_counts
    from nwor_kernels.metadata import ERROR_SLOT_RANGE

    late_counts.MAX_PENDING = 4
    window.staging.errors[0] = ERROR_SLOT_RANGE
    return window.run()


PLANTS: dict[str, Plant] = {
    "staging_fails": staging_fails,
    "commit_fails": commit_fails,
    "commit_is_refused": commit_is_refused,
    "accepts_one_less": accepts_one_less,
    "counts_one_less": counts_one_less,
    "first_accepted_dropped": first_accepted_dropped,
}
"""By name: a worker in another process finds them here."""


def watch_slots(worker: Any) -> None:
    """Compare every committed window with direct writes, slot by slot (see `SlotWatch`)."""
    worker.slot_watch = SlotWatch(worker)


def watched_slots(worker: Any) -> dict[str, int]:
    """What was compared since `watch_slots`; the watch ends."""
    watch: SlotWatch = worker.__dict__.pop("slot_watch")
    for patch in watch.patches:
        patch.__exit__(None, None, None)
    return watch.counts


class SlotWatch:
    """Holds each layer's K/V as attention hands it in, and looks into the cache after a commit.

    Accepted slots must hold exactly that, as after a direct write; rejected ones what they held
    before the window. For windows whose forward runs eagerly, in the model's own dtype or in fp8
    with scales of 1.
    """

    def __init__(self, worker: Any):
        self.counts = {"windows": 0, "accepted": 0, "rejected": 0, "wrong": 0}
        self._handed: dict[int, torch.Tensor] = {}
        self.patches = (
            wrapped(worker.nwor_hook.buffers, "stage", self.staging),
            commit_replaced(self.commit)(worker),
        )
        for patch in self.patches:
            patch.__enter__()

    def staging(self, stage: Callable[..., str]) -> Callable[..., str]:
        def watched(layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> str:
            self._handed[layer] = torch.cat([key[rows], value[rows]], dim=-1).clone()
            return stage(layer, key, value, rows)

        return watched

    def commit(self, window: Commit) -> str:
        written = window.written & window.real
        before = [window.read(layer) for layer in window.layers]
        problem = window.run()
        for layer, held in enumerate(before):
            expected = held.clone()
            expected[written] = _as_cached(self._handed[layer][written], held.dtype)
            self.counts["wrong"] += int((window.read(layer) != expected).any(dim=-1).sum())
        self.counts["windows"] += 1
        self.counts["accepted"] += int(written.sum()) * len(before)
        self.counts["rejected"] += int((~written).sum()) * len(before)
        return problem


def _as_cached(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a direct write leaves of `rows`; an fp8 cache (bytes) with scales of 1."""
    if dtype is torch.uint8:
        return rows.to(torch.float8_e4m3fn).view(torch.uint8)
    return rows.to(dtype)
