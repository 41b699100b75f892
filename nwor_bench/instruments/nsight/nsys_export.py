"""Read an SQLite export of Nsight Systems: NVTX ranges, CUDA calls, GPU work, GPU metrics.

Supports major version 3 of NVIDIA's export schema: seen in exports of Nsight Systems 2023.4 (3.7),
documented for later ones (User Guide, "SQLite Schema Reference"). Tables of what was not traced are
missing or empty (`--lazy false`); their values are None, not 0.

Domain and call numbers are unique per process only. The upper bits of a `globalTid` or `globalPid`
are the process, the lower 24 bits the thread.
"""

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.launches import HostCall
from nwor_bench.instruments.nvtx_ranges import DOMAIN

SCHEMA_MAJOR = 3

PUSH_POP, DOMAIN_CREATE, CATEGORY = 59, 75, 33
"""Kinds of NVTX events (ENUM_NSYS_EVENT_TYPE)."""

DEVICE_TO_HOST, PAGEABLE = 2, 0
"""Kind of a copy (ENUM_CUDA_MEMCPY_OPER), and memory of its target (ENUM_CUDA_MEM_KIND)."""

PROCESS = ">> 24"
"""Applied to a globalTid or globalPid: the process on that machine."""

PROCESS_ID = 0xFFFFFF
"""Mask of the operating system's process id in such a process."""

ANEW = "run the sweep under `nwor-bench profile nsys`"

NEEDED = ("NVTX_EVENTS", "StringIds")
PAYLOADS = ("int64Value", "uint64Value", "int32Value", "uint32Value")


@dataclass(frozen=True)
class NvtxRange:
    """A closed range of our domain; times in ns on the profile's clock."""

    name: str
    payload: int | None
    category: str | None
    start_ns: int
    end_ns: int
    process: int | None = None


@dataclass(frozen=True)
class DeviceWork:
    """A kernel or copy on the GPU; `called_ns` is the time of its host call, None if unknown."""

    start_ns: int
    end_ns: int
    called_ns: int | None
    process: int | None = None


@dataclass(frozen=True)
class MetricSample:
    """One sample of one GPU metric."""

    at_ns: int
    name: str
    value: float


@dataclass(frozen=True)
class NsysExport:
    """Content of an export; None for what was not traced.

    Attributes:
        calls: CUDA calls by process.
    """

    version: str
    schema: str
    ranges: list[NvtxRange]
    calls: dict[int | None, list[HostCall]] | None
    work: list[DeviceWork] | None
    samples: list[MetricSample] | None


def read_export(path: Path) -> NsysExport:
    """Read an export.

    Raises ConfigError if it is not an export, has another schema, or has no window of our domain.
    """
    if not path.is_file():
        raise _unusable(path, "there is no such file")
    try:
        # as_uri quotes #, ? and %, which have a meaning in URIs.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            return _read(path, database)
    except sqlite3.DatabaseError as error:
        raise _unusable(
            path, f"it is no SQLite database of Nsight Systems ({error}); read a .nsys-rep, or its "
            "export by `nsys export --type sqlite`"
        ) from error  # fmt: skip


def _read(path: Path, database: sqlite3.Connection) -> NsysExport:
    tables = _filled_tables(database)
    missing = [name for name in NEEDED if name not in tables]
    if missing:
        raise _unusable(
            path, f"it has no {' and no '.join(missing)}: nothing was captured, or no NVTX; {ANEW}"
        )
    facts = _export_facts(database, tables)
    schema = facts.get("EXPORT_SCHEMA_VERSION", "")
    major = facts.get("EXPORT_SCHEMA_VERSION_MAJOR") or schema.split(".")[0]
    if major and major != str(SCHEMA_MAJOR):
        raise _unusable(
            path, f"its schema is {schema or major}, and only {SCHEMA_MAJOR}.x is read; export the "
            "report again with a version that writes it, such as Nsight Systems 2023.4"
        )  # fmt: skip
    ranges = list(_ranges(database))
    if not ranges:
        raise _unusable(path, f"no range of the domain {DOMAIN!r} is in it; {ANEW}")
    if not any(found.name == "window" for found in ranges):
        raise _unusable(
            path, "it has no window: nothing was drafted in the captured range; profile again with "
            "a longer range (--capture sweep), or with a drafter that drafts"
        )  # fmt: skip
    version = facts.get("EXPORT_PRODUCT_VERSION") or facts.get("NSIGHT_SYSTEMS_VERSION") or ""
    return NsysExport(
        version=version,
        schema=schema or major,
        ranges=ranges,
        calls=_calls(database, tables) if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables else None,
        work=_work(database, tables),
        samples=_samples(database)
        if {"GPU_METRICS", "TARGET_INFO_GPU_METRICS"} <= tables
        else None,
    )


def _filled_tables(database: sqlite3.Connection) -> set[str]:
    """Names of tables with at least one row."""
    names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    return {n for (n,) in names if database.execute(f'SELECT 1 FROM "{n}" LIMIT 1').fetchone()}


def _export_facts(database: sqlite3.Connection, tables: set[str]) -> dict[str, str]:
    if "META_DATA_EXPORT" not in tables:
        return {}
    rows = database.execute("SELECT name, value FROM META_DATA_EXPORT")
    return {str(name): str(value) for name, value in rows}


def _ranges(database: sqlite3.Connection) -> Iterator[NvtxRange]:
    """Closed push-pop ranges of our domain, in order of their start."""
    columns = {row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")}
    payload = ", ".join([*(f"e.{name}" for name in PAYLOADS if name in columns), "NULL", "NULL"])
    ours = _our_domains(database)
    categories = {
        (process, domain, number): name
        for process, domain, number, name in database.execute(
            f"SELECT c.globalTid {PROCESS}, c.domainId, c.category, COALESCE(c.text, s.value) "
            "FROM NVTX_EVENTS c LEFT JOIN StringIds s ON s.id = c.textId WHERE c.eventType = ?",
            (CATEGORY,),
        )
    }
    rows = database.execute(
        f"SELECT COALESCE(e.text, s.value), COALESCE({payload}), e.category, e.start, e.end, "
        f"e.globalTid {PROCESS}, e.domainId FROM NVTX_EVENTS e "
        "LEFT JOIN StringIds s ON s.id = e.textId "
        "WHERE e.eventType = ? AND e.end IS NOT NULL ORDER BY e.start",
        (PUSH_POP,),
    )
    for name, value, category, start, end, process, domain in rows:
        if (process, domain) in ours:
            cell = categories.get((process, domain, category))
            yield NvtxRange(str(name), value, cell, start, end, process)


def _our_domains(database: sqlite3.Connection) -> set[tuple[int | None, int]]:
    """(process, number) of our domain in each process; numbers differ between processes."""
    rows = database.execute(
        f"SELECT d.globalTid {PROCESS}, d.domainId FROM NVTX_EVENTS d "
        "LEFT JOIN StringIds s ON s.id = d.textId "
        "WHERE d.eventType = ? AND COALESCE(d.text, s.value) = ?",
        (DOMAIN_CREATE, DOMAIN),
    )
    return {(process, number) for process, number in rows}


def _calls(database: sqlite3.Connection, tables: set[str]) -> dict[int | None, list[HostCall]]:
    waited_for = set()
    if "CUPTI_ACTIVITY_KIND_MEMCPY" in tables:
        waited_for = set(
            database.execute(
                f"SELECT globalPid {PROCESS}, correlationId FROM CUPTI_ACTIVITY_KIND_MEMCPY "
                "WHERE copyKind = ? AND dstKind = ?",
                (DEVICE_TO_HOST, PAGEABLE),
            )
        )
    rows = database.execute(
        f"SELECT s.value, r.start, r.end, r.globalTid {PROCESS}, r.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId ORDER BY r.start"
    )
    found: dict[int | None, list[HostCall]] = defaultdict(list)
    for name, start, end, process, number in rows:
        call = HostCall(str(name), start, end, (process, number) in waited_for)
        found[process].append(call)
    return dict(found)


def _work(database: sqlite3.Connection, tables: set[str]) -> list[DeviceWork] | None:
    """Kernels and copies with the times of their host calls; None if none were traced."""
    kinds = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
    traced = [kind for kind in kinds if f"CUPTI_ACTIVITY_KIND_{kind}" in tables]
    if not traced:
        return None
    called = {}
    if "CUPTI_ACTIVITY_KIND_RUNTIME" in tables:
        rows = database.execute(
            f"SELECT globalTid {PROCESS}, correlationId, start FROM CUPTI_ACTIVITY_KIND_RUNTIME"
        )
        called = {(process, number): start for process, number, start in rows}
    found = []
    for kind in traced:
        rows = database.execute(
            f"SELECT start, end, globalPid {PROCESS}, correlationId FROM CUPTI_ACTIVITY_KIND_{kind}"
        )
        found += [
            DeviceWork(start, end, called.get((process, number)), process)
            for start, end, process, number in rows
        ]
    return sorted(found, key=lambda work: work.start_ns)


def _samples(database: sqlite3.Connection) -> list[MetricSample]:
    rows: Sequence[Any] = database.execute(
        "SELECT DISTINCT g.timestamp, t.metricName, g.value FROM GPU_METRICS g "
        "JOIN TARGET_INFO_GPU_METRICS t ON t.typeId = g.typeId AND t.metricId = g.metricId "
        "WHERE g.timestamp IS NOT NULL ORDER BY g.timestamp"
    ).fetchall()
    return [MetricSample(at, str(name), float(value)) for at, name, value in rows]


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError.at(f"profile nsys: {path}", reason)
