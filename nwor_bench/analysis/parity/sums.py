"""Ties and acceptance of each cell, summed over its batches. Pure.

Each batch that counts is an event in the records, so that a resumed run goes on with the sums.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nwor_bench.analysis.parity.acceptance_interval import Acceptance, AcceptanceCheck
from nwor_bench.analysis.parity.batches import digest
from nwor_bench.analysis.parity.ties import PlaceVerdict, together_outside
from nwor_bench.records.types import BatchRecord, Cell

SUMS_EVENT = "parity_sums"

Tie = tuple[str, int, int, float]
"""(digest of the prompt, output position, token, multiple of the error scale)."""


@dataclass(frozen=True)
class BatchSums:
    """What one batch of a cell adds."""

    prompts: tuple[str, ...]
    """Digests of its prompts."""
    ties: tuple[Tie, ...]
    acceptance: Acceptance


def batch_sums(
    prompts: Sequence[Sequence[int]], verdicts: Sequence[PlaceVerdict], acceptance: Acceptance
) -> BatchSums:
    """What a batch adds: its differing tokens and its counts of acceptance."""
    digests = tuple(map(digest, prompts))
    ties = [(digests[v.place.request], v.place.position, v.place.token, v.multiple)
            for v in verdicts]  # fmt: skip
    return BatchSums(digests, tuple(ties), acceptance)


class ParitySums:
    """The sums of all cells, and whether sound cells can have them."""

    def __init__(self) -> None:
        self._ties: dict[Cell, dict[tuple[str, int, int], float]] = {}
        self._acceptance = AcceptanceCheck()

    def add(self, cell: Cell, batch: BatchSums) -> str | None:
        """What a sound cell's sums would not be, in words; None if they are fine."""
        # Blocks may share prompts, and equal prompts have equal ties: each counts once.
        ties = self._ties.setdefault(cell, {})
        for prompt, position, token, multiple in batch.ties:
            ties.setdefault((prompt, position, token), multiple)
        far = together_outside(len(ties), sum(multiple**2 for multiple in ties.values()))
        return far or self._acceptance.add(cell, batch.acceptance, batch.prompts)


def sums_event(cell: Cell, record: BatchRecord, batch: BatchSums) -> dict[str, Any]:
    """The batch's part for the records."""
    place = {"phase": record.phase, "block": record.block, "batch": record.batch}
    return {"event": SUMS_EVENT, **cell.names, **place, **asdict(batch)}


def read_sums(event: Mapping[str, Any]) -> BatchSums:
    """The batch's part from its event."""
    counts: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in event["acceptance"].items()
    }
    ties = tuple((prompt, at, token, multiple) for prompt, at, token, multiple in event["ties"])
    return BatchSums(tuple(event["prompts"]), ties, Acceptance(**counts))
