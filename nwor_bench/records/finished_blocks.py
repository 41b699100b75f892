"""Which blocks of a run are finished, and which batches were set aside. Pure.

A block's cells are compared with each other, so all of them come from one engine process. A
block is finished once its cells have run and were judged; a resumed run leaves it alone. A block
that was cut before is run again whole, and what it had is superseded: its records stay in the
file and count for nothing but faults.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nwor_bench.records.types import BatchRecord, Phase

BlockKey = tuple[Phase, int]
"""(phase, block number)."""

FINISHED_EVENT = "block_finished"
SUPERSEDED_EVENT = "superseded"


def finished_event(block: BlockKey) -> dict[str, Any]:
    """Every cell of the block has run and was judged."""
    return {"event": FINISHED_EVENT, "phase": block[0], "block": block[1]}


def superseded_event(block: BlockKey, batches: Iterable[int], at: str) -> dict[str, Any]:
    """The block runs again from here on: its batches of these numbers are set aside."""
    return {
        "event": SUPERSEDED_EVENT,
        "phase": block[0],
        "block": block[1],
        "batches": sorted(batches),
        "at": at,
    }


def superseded_numbers(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """The numbers of all batches that were set aside."""
    told = (event["batches"] for event in events if event.get("event") == SUPERSEDED_EVENT)
    return {number for numbers in told for number in numbers}


def first_tries(
    superseded: Sequence[BatchRecord], events: Iterable[Mapping[str, Any]]
) -> list[list[BatchRecord]]:
    """The batches that were set aside, those of one block and engine process together."""
    numbers = [event["batches"] for event in events if event.get("event") == SUPERSEDED_EVENT]
    return [[batch for batch in superseded if batch.batch in own] for own in numbers]


def other_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """All events but those that say that a block is finished."""
    return [event for event in events if event.get("event") != FINISHED_EVENT]


def finished_blocks(
    batches: Sequence[BatchRecord], events: Iterable[Mapping[str, Any]]
) -> frozenset[BlockKey]:
    """The blocks that were run and judged to their end.

    Records of older versions do not say so: there a block is finished if another one followed.

    Args:
        batches: those that were not set aside.
        events: the run's.
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
    """The blocks that were begun and not finished, each with the numbers of its batches."""
    cut: dict[BlockKey, list[int]] = {}
    for batch in batches:
        if batch.phase != Phase.WARMUP and block_of(batch) not in finished:
            cut.setdefault(block_of(batch), []).append(batch.batch)
    return cut


def block_of(batch: BatchRecord) -> BlockKey:
    """The block that a batch belongs to."""
    return (batch.phase, batch.block)


def block_name(block: BlockKey) -> str:
    """For people: `block 3 (timed)`."""
    return f"block {block[1]} ({block[0]})"
