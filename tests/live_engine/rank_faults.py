"""What tests plant in every worker process, or read from it, by `collective_rpc` of a function."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nwor_bench.engine.engine import VllmEngine

FAULT = "planted fault"


def on_ranks(engine: VllmEngine, function: Any, *args: Any) -> list[Any]:
    """Call `function(worker, *args)` in every worker; the answers in the ranks' order."""
    return list(engine._llm.collective_rpc(function, args=args))


@contextmanager
def planted(engine: VllmEngine, plant: Any, rank: int) -> Iterator[None]:
    """With `plant` done on one rank; `heal` takes it away."""
    on_ranks(engine, _on_one_rank, plant, rank)
    try:
        yield
    finally:
        on_ranks(engine, heal)


def _on_one_rank(worker: Any, plant: Any, rank: int) -> None:
    if worker.rank == rank:
        plant(worker)


def heal(worker: Any) -> None:
    """Take away what was planted over methods of the hook's parts."""
    hook = worker.nwor_hook
    for part in (hook.buffers, hook.validator, hook.accumulator):
        for name in ("stage", "commit", "validate", "add"):
            vars(part).pop(name, None)


def staging_fails(worker: Any) -> None:
    """Layer 1 cannot be staged."""
    buffers = worker.nwor_hook.buffers
    stage = buffers.stage

    def broken(layer: int, *args: Any) -> Any:
        if layer == 1:
            raise RuntimeError(FAULT)
        return stage(layer, *args)

    buffers.stage = broken


def commit_is_refused(worker: Any) -> None:
    """The device refuses every commit of this rank, which reads its counts after four steps."""
    from nwor_bench.plugin import late_counts
    from nwor_kernels.metadata import ERROR_SLOT_RANGE

    buffers = worker.nwor_hook.buffers
    commit = buffers.commit

    def refused(*args: Any) -> Any:
        buffers.errors[0] = ERROR_SLOT_RANGE
        return commit(*args)

    buffers.commit = refused
    late_counts.MAX_PENDING = 4


def commit_fails(worker: Any) -> None:
    """Nothing can be committed."""

    def broken(*_: Any) -> Any:
        raise RuntimeError(FAULT)

    worker.nwor_hook.buffers.commit = broken


def accepts_one_less(worker: Any) -> None:
    """This rank's validation finds one accepted draft less than the others', where there is one."""

    validator = worker.nwor_hook.validator
    validate = validator.validate

    def other(*args: Any) -> Any:
        found = validate(*args)
        if not sum(found.num_accepted):
            return found
        counts = list(found.num_accepted)
        most = counts.index(max(counts))
        counts[most] -= 1
        accepted = found.accepted.clone()
        accepted[accepted.nonzero()[-1]] = False
        return replace(found, num_accepted=counts, accepted=accepted)

    validator.validate = other


def commit_drops_a_row(worker: Any) -> None:
    """The first accepted draft of each window is not written."""
    buffers = worker.nwor_hook.buffers
    commit = buffers.commit

    def wrong(slots: torch.Tensor, accepted: torch.Tensor) -> Any:
        fewer = accepted.clone()
        fewer[accepted.nonzero()[:1]] = False
        return commit(slots, fewer)

    buffers.commit = wrong


def counts_one_less(worker: Any) -> None:
    """This rank records one staged token less than there were."""
    accumulator = worker.nwor_hook.accumulator
    add = accumulator.add

    def wrong(counts: Any, *given: Any) -> None:
        add(replace(counts, staged_tokens=counts.staged_tokens - 1), *given)

    accumulator.add = wrong


def watch_slots(worker: Any) -> None:
    """Compare every committed window with direct writes, slot by slot (see `SlotWatch`)."""
    worker.slot_watch = SlotWatch(worker.nwor_hook)


def watched_slots(worker: Any) -> dict[str, int]:
    """What was compared since `watch_slots`; the watch ends."""
    watch = worker.__dict__.pop("slot_watch")
    heal(worker)
    return dict(watch.counts)


class SlotWatch:
    """Holds each layer's K/V as attention hands it in, and looks into the cache after a commit.

    Accepted slots must hold exactly that, as after a direct write; rejected ones what they held
    before the window. For windows whose forward runs eagerly, in the model's own dtype or in fp8
    with scales of 1.
    """

    def __init__(self, hook: Any):
        self.counts = {"windows": 0, "accepted": 0, "rejected": 0, "wrong": 0}
        self._buffers = hook.buffers
        self._handed: dict[int, torch.Tensor] = {}
        self._stage, self._commit = hook.buffers.stage, hook.buffers.commit
        hook.buffers.stage, hook.buffers.commit = self.stage, self.commit

    def stage(self, layer: int, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> str:
        self._handed[layer] = torch.cat([key[rows], value[rows]], dim=-1).clone()
        return str(self._stage(layer, key, value, rows))

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor) -> str:
        real = (slots if slots.dim() == 1 else slots[self._buffers.layers[0].slot_row]) >= 0
        written = self._written_rows(slots, accepted) & real
        before = [self._read(layer, slots) for layer in range(self._buffers.num_layers)]
        problem = str(self._commit(slots, accepted))
        for layer, held in enumerate(before):
            expected = held.clone()
            expected[written] = _as_cached(self._handed[layer][written], held.dtype)
            self.counts["wrong"] += int((self._read(layer, slots) != expected).any(dim=-1).sum())
        self.counts["windows"] += 1
        self.counts["accepted"] += int(written.sum()) * len(before)
        self.counts["rejected"] += int((~written).sum()) * len(before)
        return problem

    def _written_rows(self, slots: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Which staged rows the commit writes: a mask as it is (V1), or from counts (V2)."""
        if accepted.dtype is torch.bool:
            return accepted
        batch = self._buffers._batch
        rows = torch.arange(slots.shape[-1], device=slots.device)
        if batch.tokens_per_request is None:  # only drafts are staged
            return batch.row_index < accepted[batch.row_request]
        # The certain first token is staged too; `num_sampled` counts it, accepted drafts do not.
        certain = 0 if self._buffers._through is not None else 1
        length = batch.tokens_per_request
        return rows % length < accepted[rows // length] + certain

    def _read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        cache = self._buffers.layers[layer].kv_cache
        if slots.dim() == 2:
            slots = slots[self._buffers.layers[layer].slot_row]
        size = cache.shape[2]
        rows = torch.stack([cache[int(s) // size, :, int(s) % size] for s in slots])
        return rows.view(torch.uint8) if rows.dtype is torch.float8_e4m3fn else rows


def _as_cached(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a direct write leaves of `rows`; an fp8 cache (bytes) with scales of 1."""
    if dtype is torch.uint8:
        return rows.to(torch.float8_e4m3fn).view(torch.uint8)
    return rows.to(dtype)
