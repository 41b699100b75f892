"""Finished blocks of a run, and batches that were superseded. Pure.

A block's cells are compared with each other, so all of them come from one engine process. A
block is finished once all its cells have run and were checked; a resumed run does not repeat it.
An interrupted block runs again as a whole, and its earlier batches are superseded: their records
stay in the file and only their faults still count.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nwor_bench.records.types import BatchRecord, Phase

BlockKey = tuple[Phase, int]
"""(phase, block number)."""

FINISHED_EVENT = "block_finished"
SUPERSEDED_EVENT = "superseded"


def finished_event(block: BlockKey) -> dict[str, Any]:
    """Event: every cell of the block has run and was checked."""
    return {"event": FINISHED_EVENT, "phase": block[0], "block": block[1]}


def superseded_event(block: BlockKey, batches: Iterable[int], at: str) -> dict[str, Any]:
    """Event: the block runs again; its batches with these numbers are superseded."""
    return {
        "event": SUPERSEDED_EVENT,
        "phase": block[0],
        "block": block[1],
        "batches": sorted(batches),
        "at": at,
    }


def superseded_numbers(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """The numbers of all superseded batches."""
    told = (event["batches"] for event in events if event.get("event") == SUPERSEDED_EVENT)
    return {number for numbers in told for number in numbers}


def first_tries(
    superseded: Sequence[BatchRecord], events: Iterable[Mapping[str, Any]]
) -> list[list[BatchRecord]]:
    """The superseded batches, grouped by block and engine process."""
    numbers = [event["batches"] for event in events if event.get("event") == SUPERSEDED_EVENT]
    return [[batch for batch in superseded if batch.batch in own] for own in numbers]


def other_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All events except those of finished blocks."""
    return [event for event in events if event.get("event") != FINISHED_EVENT]


def finished_blocks(
    batches: Sequence[BatchRecord], events: Iterable[Mapping[str, Any]]
) -> frozenset[BlockKey]:
    """The blocks that were run and checked to their end.

    Older versions recorded no such event: there a block is finished if another one followed.

    Args:
        batches: the run's batches without superseded ones.
        events: the run's events.
    """
    finished = {
        (event["phase"], event["block"]) for event in events if event.get("event") == FINISHED_EVENT
    }
    measured = [batch for batch in batches if batch.phase != Phase.WARMUP]
    if measured:
        last = max(measured, key=lambda batch: batch.batch)
        finished |= {block_of(batch) for batch in measured} - {block_of(last)}
    return frozenset(finished)


def cut_blocks(
    batches: Sequence[BatchRecord], finished: Collection[BlockKey]
) -> dict[BlockKey, list[int]]:
    """Unfinished blocks, each with the numbers of its batches."""
    cut: dict[BlockKey, list[int]] = {}
    for batch in batches:
        if batch.phase != Phase.WARMUP and block_of(batch) not in finished:
            cut.setdefault(block_of(batch), []).append(batch.batch)
    return cut


def block_of(batch: BatchRecord) -> BlockKey:
    """The block that a batch belongs to; the gate's interleaved batches are part of the gate."""
    return _key(batch.phase, batch.block)


def is_finished(event: Mapping[str, Any], finished: Collection[BlockKey]) -> bool:
    """True if the event's batch belongs to a finished block."""
    return _key(event["phase"], event["block"]) in finished


def _key(phase: Phase, block: int) -> BlockKey:
    return (Phase.GATE if phase == Phase.INTERLEAVED_GATE else phase, block)


def block_name(block: BlockKey) -> str:
    """For people: `block 3 (timed)`."""
    return f"block {block[1]} ({block[0]})"
