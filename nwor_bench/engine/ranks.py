"""With tensor parallelism every rank counts every window; a run stores the first rank's records.

They represent all ranks only while the ranks agree, which is checked after every batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nwor_bench.errors import EngineError
from nwor_bench.records.engine_status import EngineStatus, RankStatus
from nwor_bench.records.json_part import PartError, read_part

MAY_DIFFER = ("device", "totals")
"""Facts of a worker in which ranks may differ; `totals` follow from the windows."""


def disagreement(windows_by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Where the ranks' windows differ in a count, as half a sentence; None if they agree.

    Args:
        windows_by_rank: the same batch as each rank recorded it, the first rank first. Times
            (names ending in `_ms`) are each rank's own.
    """
    first, *others = windows_by_rank
    for rank, windows in enumerate(others, start=1):
        if len(windows) != len(first):
            return f"rank {rank} ran {len(windows)} windows and rank 0 {len(first)}"
        for number, (ours, theirs) in enumerate(zip(first, windows, strict=True)):
            for name, value in ours.items():
                if not name.endswith("_ms") and value != theirs[name]:
                    return (
                        f"window {number} has {name} {theirs[name]!r} on rank {rank} and "
                        f"{value!r} on rank 0"
                    )
    return None


def common_status(statuses: Sequence[Mapping[str, Any]]) -> EngineStatus:
    """The first rank's facts, and the facts that each rank has for itself.

    Raises EngineError if the ranks differ where they must not: with different numbers of layers,
    blocks or captured graphs they would take different paths through the same window.
    """
    first = statuses[0]
    for rank, status in enumerate(statuses):
        for name in first.keys() - set(MAY_DIFFER):
            if status[name] != first[name]:
                raise EngineError.at(
                    f"rank {rank} has {name}",
                    f"{status[name]!r}, rank 0 {first[name]!r}: ranks that differ cannot be "
                    "measured as one engine",
                    status[name],
                    joint=" ",
                )
    facts = dict(first)
    if len(statuses) > 1:
        facts["ranks"] = [{name: s[name] for name in RankStatus.names()} for s in statuses]
    try:
        return read_part(EngineStatus, facts)
    except PartError as error:
        raise EngineError.at(
            "what the worker says of itself is not understood", str(error)
        ) from error
