"""Cut an export of Nsight Systems down to what its reader looks at, for tests/data.

    python tests/instruments/cut_nsys_export.py EXPORT SMALL [--spans BATCH:FIRST-LAST ...]

Kept as they are: the tables' own statements, NVTX events, CUDA's calls, GPU work, the texts that
they name, and which version wrote the export; with --spans only those from the first window of a
batch to 1 ms into the last. Columns of calls and work that nobody reads are emptied. Everything
else goes, what names the machine and its folders first.
"""

import argparse
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

WORK = tuple(f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
KEPT = ("StringIds", "NVTX_EVENTS", "META_DATA_EXPORT", "ENUM_NSYS_EVENT_TYPE")
TIMED = ("NVTX_EVENTS", CALLS, *WORK)
READ = frozenset(
    {
        *("start", "end", "eventClass", "globalTid", "globalPid", "correlationId", "nameId"),
        *("graphNodeId", "streamId", "copyKind", "srcKind", "dstKind"),
    }
)
"""Of calls and work: what is looked at, here or by a reader of the test's data."""

TAIL_NS = 1_000_000


def cut(source: Path, target: Path, spans: list[tuple[int, int, int]] | None = None) -> None:
    """Write the small export anew. A span is a batch, its first and its last window."""
    shutil.copy(source, target)
    with closing(sqlite3.connect(target)) as db:
        tables = [n for (n,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for name in tables:
            if name not in (*KEPT, CALLS, *WORK):
                db.execute(f'DROP TABLE "{name}"')
        timed = [name for name in TIMED if name in tables]
        if spans is not None:
            _keep_spans(db, timed, spans)
        for name in timed:
            if name != "NVTX_EVENTS":
                _empty_unread(db, name)
        named = "SELECT textId FROM NVTX_EVENTS WHERE textId IS NOT NULL"
        if CALLS in tables:
            named += f" UNION SELECT nameId FROM {CALLS}"
        db.execute(f"DELETE FROM StringIds WHERE id NOT IN ({named})")
        db.execute(
            "DELETE FROM META_DATA_EXPORT WHERE name NOT LIKE 'EXPORT_PRODUCT%' "
            "AND name NOT LIKE 'EXPORT_SCHEMA%'"
        )
        db.commit()
        db.execute("VACUUM")


def _keep_spans(
    db: sqlite3.Connection, timed: list[str], spans: list[tuple[int, int, int]]
) -> None:
    """Of events with a time only those that lie in a span; ranges around one stay whole."""
    times = [_times_of(db, *span) for span in spans]
    for name in timed:
        whole = name == "NVTX_EVENTS"  # the last window's ranges are kept to its end
        inside = " OR ".join(
            f"(start < {end if whole else last + TAIL_NS} AND end > {first})"
            for first, last, end in times
        )
        db.execute(f"DELETE FROM {name} WHERE end IS NOT NULL AND NOT ({inside})")


def _times_of(db: sqlite3.Connection, batch: int, first: int, last: int) -> tuple[int, int, int]:
    """Start of the first window, start and end of the last."""
    ranges = (
        "SELECT e.start, e.end FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
        "WHERE e.eventType = 59 AND COALESCE(e.text, s.value) = ? AND e.int64Value = ?"
    )
    start, end = db.execute(ranges, ("batch", batch)).fetchone()
    inside = f"{ranges} AND e.start BETWEEN {start} AND {end}"
    (begin, _), window = (
        db.execute(inside, ("window", number)).fetchone() for number in (first, last)
    )
    return begin, *window


def _empty_unread(db: sqlite3.Connection, table: str) -> None:
    columns = db.execute(f"PRAGMA table_info({table})").fetchall()
    unread = [
        f'"{name}" = {0 if not_null else "NULL"}'
        for _, name, _, not_null, *_ in columns
        if name not in READ
    ]
    db.execute(f"UPDATE {table} SET {', '.join(unread)}")


def _span(text: str) -> tuple[int, int, int]:
    batch, windows = text.split(":")
    first, last = windows.split("-")
    return int(batch), int(first), int(last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--spans", type=_span, nargs="*")
    given = parser.parse_args()
    cut(given.source, given.target, given.spans)
