"""Records as lines of JSON: one line per window, batch or event, each with its kind."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nwor_bench.errors import StoreError
from nwor_bench.records.files import parse_json
from nwor_bench.records.types import INTERLEAVED_PHASES, BatchRecord, WindowRecord, to_dict

BatchKey = tuple[str, int, int]
Record = WindowRecord | BatchRecord | dict[str, Any]

_WINDOW = TypeAdapter(WindowRecord)
_BATCH = TypeAdapter(BatchRecord)


@dataclass
class Records:
    """The records of a file, and how many of its bytes are whole batches and events."""

    batches: list[BatchRecord] = field(default_factory=list)
    windows: list[WindowRecord] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    whole_bytes: int = 0


def batch_key(record: BatchRecord | WindowRecord) -> BatchKey:
    """Key shared by a batch and its windows: (pair, block, batch)."""
    return (record.pair, record.block, record.batch)


def is_own(window: WindowRecord, batch: BatchRecord) -> bool:
    """True for a window of this batch: of its cell, unless it is interleaved."""
    if batch_key(window) != batch_key(batch):
        return False
    modes = [(str(record.nwor_mode), str(record.scv_mode)) for record in (window, batch)]
    return batch.phase in INTERLEAVED_PHASES or modes[0] == modes[1]


def record_line(record: WindowRecord | BatchRecord) -> bytes:
    """A record's line, newline included. Raises StoreError if a value has no JSON form."""
    kind = "batch" if isinstance(record, BatchRecord) else "window"
    return _line(kind, to_dict(record))


def event_line(event: dict[str, Any]) -> bytes:
    """An event's line, newline included.

    Raises StoreError if a value has no JSON form, or the event has a field "kind".
    """
    if "kind" in event:
        raise StoreError.at(
            'an event may not have a field "kind"', "it names the record's type", event["kind"]
        )
    return _line("event", event)


def parse_records(path: Path, data: bytes) -> Records:
    """Split a file's bytes into records; only its last line may be incomplete.

    A batch's windows stand before it, and its own line is what makes them count. `path` is
    for messages only. Raises StoreError if a whole line is no record.
    """
    records = Records()
    pending: list[WindowRecord] = []
    seen: set[BatchKey] = set()
    position = 0
    *lines, tail = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        record = _parse_line(path, number, line)
        position += len(line) + 1
        if isinstance(record, WindowRecord):
            pending.append(record)
        elif isinstance(record, BatchRecord):
            _check_batch(record, pending, seen, f"{path}:{number}")
            seen.add(batch_key(record))
            records.batches.append(record)
            records.windows.extend(pending)
            pending = []
        else:
            records.events.append(record)
        if not pending:
            records.whole_bytes = position
    if tail:
        records.warnings.append(
            f"{path.name}: its last line ({len(tail)} bytes) was not written to the end "
            "and is left out."
        )
    if pending:
        records.warnings.append(
            f"{path.name}: {len(pending)} windows at its end have no batch record and are left out."
        )
    return records


def _check_batch(
    batch: BatchRecord, windows: Sequence[WindowRecord], seen: Collection[BatchKey], place: str
) -> None:
    """Raise StoreError if the windows before a batch are not its own, or it is a duplicate."""
    if not all(is_own(window, batch) for window in windows):
        raise StoreError.at(place, "the windows before it are of another batch")
    if len(windows) != batch.windows:
        raise StoreError.at(
            place,
            f"{len(windows)} windows stand before a batch of {batch.windows}; lines are "
            "missing or written twice",
            len(windows),
        )
    if batch_key(batch) in seen:
        raise StoreError.at(f"{place}: batch {batch.batch}", "was there before", joint=" ")


def _line(kind: str, fields: dict[str, Any]) -> bytes:
    try:
        text = json.dumps({**fields, "kind": kind}, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError.at(f"a {kind} record cannot be stored", str(error)) from error
    return text.encode() + b"\n"


def _parse_line(
    path: Path, number: int, line: bytes
) -> WindowRecord | BatchRecord | dict[str, Any]:
    try:
        fields = parse_json(line)
        kind = fields.pop("kind")
        if kind == "window":
            return _WINDOW.validate_json(line, strict=True)
        if kind == "batch":
            return _BATCH.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        field = f"{path}:{number}: {kind} record, {place}"
        raise StoreError.at(field, first["msg"], first["input"]) from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise StoreError.at(f"{path}:{number}", f"not a record ({error})") from error
    if kind != "event":
        raise StoreError.at(f"{path}:{number}", f"unknown record kind {kind!r}", kind)
    return fields
