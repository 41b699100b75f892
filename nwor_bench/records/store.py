"""A run folder: `run.json` (the header) and `records.jsonl` (one record per line).

A batch is written as one append: its windows' lines, then its own. Windows count only with their
batch's line, so a run that dies in the middle of an append loses that batch only.

A block is finished when all its cells have run and were checked, in one engine process, since its
cells are compared with each other. A resumed run does not repeat it. An interrupted block runs
again as a whole; its earlier batches stay in the file as superseded: only their faults count.
"""

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.records.facts import to_json
from nwor_bench.records.files import (
    RECORDS_FILE,
    RUN_FILE,
    check_output,
    not_writable,
    records_path,
    sync_folder,
    write_atomically,
)
from nwor_bench.records.header import RunHeader, parse_header, read_object
from nwor_bench.records.lines import (
    BatchKey,
    batch_key,
    event_line,
    is_own,
    parse_records,
    record_line,
)
from nwor_bench.records.types import FORMAT_VERSION, BatchRecord, Phase, RunStatus, WindowRecord

BlockKey = tuple[Phase, int]
"""(phase, block number)."""

FINISHED_EVENT = "block_finished"
"""Event: every cell of the block has run and was checked."""

SUPERSEDED_EVENT = "superseded"
"""Event: the block runs again; its batches with these numbers are superseded."""


def block_of(item: BatchRecord | Mapping[str, Any]) -> BlockKey:
    """A batch's or event's block; the gate's interleaved batches are part of the gate."""
    if isinstance(item, BatchRecord):
        phase, block = item.phase, item.block
    else:
        phase, block = item["phase"], item["block"]
    return (Phase.GATE if phase == Phase.INTERLEAVED_GATE else phase, block)


def block_name(block: BlockKey) -> str:
    """For people: `block 3 (timed)`."""
    return f"block {block[1]} ({block[0]})"


@dataclass(frozen=True)
class RunData:
    """Everything that a run folder holds. `warnings` are sentences for the top of a report.

    `superseded` are the batches of interrupted blocks that ran again, `superseded_windows` their
    windows: no number uses them, but their faults still count. `finished` are the blocks that a
    resumed run does not repeat.
    """

    header: RunHeader
    batches: tuple[BatchRecord, ...]
    windows: tuple[WindowRecord, ...]
    events: tuple[dict[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    superseded: tuple[BatchRecord, ...] = ()
    superseded_windows: tuple[WindowRecord, ...] = ()
    finished: frozenset[BlockKey] = frozenset()

    def cut_blocks(self) -> dict[BlockKey, list[int]]:
        """Unfinished blocks, each with the numbers of its batches."""
        cut: dict[BlockKey, list[int]] = {}
        for batch in self.batches:
            block = block_of(batch)
            if batch.phase != Phase.WARMUP and block not in self.finished:
                cut.setdefault(block, []).append(batch.batch)
        return cut

    def first_tries(self) -> list[list[BatchRecord]]:
        """The superseded batches, grouped by block and engine process."""
        numbers = [e["batches"] for e in self.events if e.get("event") == SUPERSEDED_EVENT]
        return [[batch for batch in self.superseded if batch.batch in ids] for ids in numbers]


class RunStore:
    """Writes one run folder, a batch at a time; each append is on the disk when it returns."""

    def __init__(self, folder: Path, header: RunHeader, keys: set[BatchKey]) -> None:
        """Use `create` or `open` instead."""
        self.folder = folder
        self.header = header
        self._keys = keys

    @classmethod
    def create(cls, folder: Path, header: RunHeader) -> "RunStore":
        """Start a run in `folder` (made with its parents), with status "partial" until it ends.

        Raises ConfigError if the folder already holds a run or cannot be written.
        """
        check_output(folder)
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RECORDS_FILE).touch(exist_ok=False)
            for changed in (folder, *(path.parent for path in new)):
                sync_folder(changed)
        except FileExistsError as error:
            raise not_writable(folder, error) from error
        except OSError as error:
            raise not_writable(folder, error) from error
        full = header.model_copy(
            update={"format_version": FORMAT_VERSION, "status": RunStatus.PARTIAL}
        )
        write_header(folder, full)
        return cls(folder, full, set())

    @classmethod
    def open(cls, folder: Path) -> "RunStore":
        """Reopen a run to add to it; half-written records at its end are cut off.

        Raises ConfigError if there is no run, StoreError if it is damaged or of another version.
        """
        header = read_header(folder)
        path = folder / RECORDS_FILE
        records = parse_records(path, _read_bytes(path))
        try:
            os.truncate(path, records.whole_bytes)
            for leftover in folder.glob(".*.tmp"):  # of `write_atomically`, cut short
                leftover.unlink()
        except OSError as error:
            raise StoreError.at(path, f"cannot be written ({error.strerror})") from error
        return cls(folder, header, {batch_key(batch) for batch in records.batches})

    def append_batch(self, batch: BatchRecord, windows: Sequence[WindowRecord]) -> None:
        """Add a batch with its windows.

        Raises StoreError if the disk refuses it, a value has no JSON form (NaN), the cell
        already has a batch of this block and number, or the windows are not the batch's.
        """
        key = batch_key(batch)
        if key in self._keys:
            raise StoreError.at(
                f"batch {key}", "is already in the run; number a cell's batches apart", joint=" "
            )
        strangers = [window for window in windows if not is_own(window, batch)]
        if strangers:
            window = strangers[0]
            came = f"a window of {window.cell.label}, batch {window.batch}"
            wrong = f"came with batch {batch.batch} of {batch.cell.label}"
            raise StoreError.at(came, wrong, joint=", ")
        if len(windows) != batch.windows:
            came = f"came with {len(windows)} of its {batch.windows} windows"
            raise StoreError.at(f"batch {key}", came, len(windows), joint=" ")
        lines = [record_line(window) for window in windows]
        self._append(b"".join([*lines, record_line(batch)]))
        self._keys.add(key)

    def append_event(self, event: dict[str, Any]) -> None:
        """Add an event as a plain dict (a start, a retry, an interruption).

        Raises StoreError if the disk refuses it or the event has a field of the name "kind".
        """
        self._append(event_line(event))

    def update(self, **changes: Any) -> None:
        """Set fields of the header and rewrite run.json atomically."""
        header = self.header.model_copy(update=changes)
        write_header(self.folder, header)
        self.header = header

    def finish(self, status: RunStatus, **changes: Any) -> None:
        """Set the final status and other fields of the header."""
        self.update(status=status, **changes)

    def _append(self, data: bytes) -> None:
        path = self.folder / RECORDS_FILE
        try:
            before = path.stat().st_size
            try:
                with path.open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                # Ctrl-C or a full disk: leave no half line for the next append to run into. Not
                # before the file is closed, which writes what is left in its buffer.
                os.truncate(path, before)
                raise
        except OSError as error:
            raise StoreError.at(path, f"cannot be written ({error.strerror})") from error


def read_run(folder: Path) -> RunData:
    """Read a run; half-written records after a crash are skipped and named in `warnings`.

    Superseded batches are kept apart, and their events are left out.

    Raises ConfigError if the folder holds no run, StoreError if the run is damaged or was
    written in a format that this version does not read.
    """
    header = read_header(folder)
    path = records_path(folder)
    records = parse_records(path, _read_records(path))
    by_kind = {
        kind: [event for event in records.events if event.get("event") == kind]
        for kind in (FINISHED_EVENT, SUPERSEDED_EVENT)
    }
    aside = {number for event in by_kind[SUPERSEDED_EVENT] for number in event["batches"]}
    others = [e for e in records.events if e.get("event") != FINISHED_EVENT]
    return RunData(
        header=header,
        batches=tuple(b for b in records.batches if b.batch not in aside),
        windows=tuple(w for w in records.windows if w.batch not in aside),
        events=tuple(e for e in others if e.get("batch") not in aside),
        warnings=tuple(records.warnings),
        superseded=tuple(b for b in records.batches if b.batch in aside),
        superseded_windows=tuple(w for w in records.windows if w.batch in aside),
        finished=frozenset((e["phase"], e["block"]) for e in by_kind[FINISHED_EVENT]),
    )


def _read_records(path: Path) -> bytes:
    data = _read_bytes(path)
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError.at(path, f"cannot be decompressed ({error}); restore it") from error


def write_header(folder: Path, header: RunHeader) -> None:
    """Write run.json atomically."""
    text = json.dumps(to_json(header), indent=2, allow_nan=False)
    write_atomically(folder / RUN_FILE, f"{text}\n")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise StoreError.at(
            path,
            "is not there; a baseline that was stored without its records can be compared "
            "(nwor-bench compare), neither reported anew nor continued",
        ) from error
    except OSError as error:
        raise StoreError.at(path, f"cannot be read ({error.strerror})") from error


def read_header(folder: Path) -> RunHeader:
    """The header in a run's run.json.

    Raises ConfigError if the folder holds no run, StoreError if it is not JSON, of a format
    version that this one does not read, or holds a part of the wrong kind.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        raise ConfigError.for_field(
            "run folder", str(folder), f"name a folder that holds a {RUN_FILE}"
        )
    values = read_object(_read_bytes(path), path)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError.at(
            f"{path}: format_version",
            f"{version!r} is unknown; this nwor-bench reads {FORMAT_VERSION}: run the sweep again",
            version,
            joint=" ",
        )
    return parse_header(values, path)
