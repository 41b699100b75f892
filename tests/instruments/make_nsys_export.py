"""Write tests/data/nsys_windows.sqlite: a made-up export of a GPU in Nsight Systems' schema.

    python tests/instruments/make_nsys_export.py nsys_windows.sqlite && gzip -9n nsys_windows.sqlite

Tables, columns and types are those that Nsight Systems 2023.4.4 itself makes (schema 3.7.2). Three
processes: the harness has the batches, a worker the windows, a stranger the same numbers of calls.
Two batches of three windows; every time is a whole number that a reader can add up in the head.
"""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

TABLES = """
CREATE TABLE META_DATA_EXPORT (
    name TEXT NOT NULL, value TEXT
);
CREATE TABLE StringIds (
    id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL
);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category
    INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value
    INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT
);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid
    INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER
    NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName
    INTEGER, launchType INTEGER, cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX
    INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL,
    blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
    localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER,
    graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER
    NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId
    INTEGER, srcKind INTEGER, dstKind INTEGER, srcDeviceId INTEGER, srcContextId INTEGER,
    dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER, graphNodeId INTEGER,
    virtualAddress INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER
    NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER,
    memKind INTEGER
);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER
    NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL
);
CREATE TABLE TARGET_INFO_GPU_METRICS (
    typeId INTEGER NOT NULL, sourceId INTEGER NOT NULL, typeName TEXT NOT NULL, metricId INTEGER
    NOT NULL, metricName TEXT NOT NULL
);
CREATE TABLE GPU_METRICS (
    timestamp INTEGER, typeId INTEGER NOT NULL, metricId INTEGER NOT NULL, value INTEGER NOT
    NULL
);
"""
"""Of `nsys export --lazy=false`, Nsight Systems 2023.4.4."""

STRINGS = ["sweep", "batch", "window", "nwor-bench", "cudaLaunchKernel_v7000",
           "cudaGraphLaunch_v10000", "cudaStreamSynchronize_v3020", "cudaMemcpyAsync_v3020",
           "cudaGetDevice_v3020", "gemm", "stranger"]  # fmt: skip
ID = {name: number for number, name in enumerate(STRINGS, start=1)}
HARNESS, WORKER, STRANGER = ((0x1000000 + pid) << 24 for pid in (41, 42, 43))
"""globalPid of each process; a globalTid has the thread's number besides."""
OURS = {HARNESS: 7, WORKER: 8}
OTHER = {HARNESS: 8, WORKER: 7}
"""Numbers of the domain nwor-bench and of another one: each process has its own."""
CELLS = {1: "off x off", 2: "stage x graph"}
MS = 1_000_000
BATCHES = ((0, 1, 10 * MS), (1, 2, 110 * MS))
"""Number, category and start of each batch."""

CALLS = {
    1: ["cudaLaunchKernel_v7000", "cudaGraphLaunch_v10000", "cudaLaunchKernel_v7000",
        "cudaStreamSynchronize_v3020", "cudaMemcpyAsync_v3020", "cudaGetDevice_v3020"],
    2: ["cudaGraphLaunch_v10000", "cudaGraphLaunch_v10000", "cudaLaunchKernel_v7000"],
}  # fmt: skip
"""Calls of each window of a category, 0.5 ms apart, the first 1 ms into the window."""


def write(path: Path) -> None:
    """Write the whole export anew."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(TABLES)
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, n) for n, i in ID.items()])
        facts = {"EXPORT_SCHEMA_VERSION": "3.7.2", "EXPORT_SCHEMA_VERSION_MAJOR": "3",
                 "EXPORT_PRODUCT_VERSION": "none: made up"}  # fmt: skip
        db.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", facts.items())
        for process in (HARNESS, WORKER):
            _name(db, 75, process, OURS[process], text_id=ID["nwor-bench"])
            _name(db, 75, process, OTHER[process], text="elsewhere")
            for number, cell in CELLS.items():
                _name(db, 33, process, OURS[process], text=cell, category=number)
        db.executemany(
            "INSERT INTO TARGET_INFO_GPU_METRICS VALUES (1, 1, 'GPU Metrics', ?, ?)",
            [(1, "DRAM Read Bandwidth [Throughput %]"), (2, "DRAM Write Bandwidth [Throughput %]")],
        )
        _range(db, HARNESS, "sweep", 2, None, 5 * MS, 200 * MS)
        correlation = 0
        for number, category, began in BATCHES:
            _range(db, HARNESS, "batch", number, category, began, began + 60 * MS)
            for window in range(3):
                start = began + 10 * MS * window
                _range(db, WORKER, "window", window, category, start, start + 8 * MS)
                _range(db, WORKER, "stranger", 99, None, start, start + MS, OTHER[WORKER])
                for place, name in enumerate(CALLS[category]):
                    correlation += 1
                    _call(db, WORKER, name, start + MS + place * MS // 2, correlation)
                    _call(db, STRANGER, name, start - 3 * MS, correlation)
                    if "Launch" in name:
                        _kernel(db, WORKER, start + 2 * MS + place * MS, 2 * MS, correlation)
                        _kernel(db, STRANGER, start, 9 * MS, correlation)
                for metric, value in ((1, 40 + window), (2, 10 * number)):
                    db.execute(
                        "INSERT INTO GPU_METRICS VALUES (?, 1, ?, ?)",
                        (start + 3 * MS, metric, value),
                    )
        db.commit()


def _name(
    db: sqlite3.Connection, kind: int, process: int, domain: int, text: str | None = None,
    text_id: int | None = None, category: int | None = None,
) -> None:  # fmt: skip
    db.execute(
        "INSERT INTO NVTX_EVENTS (start, eventType, globalTid, domainId, text, textId, category) "
        "VALUES (0, ?, ?, ?, ?, ?, ?)",
        (kind, process + 5, domain, text, text_id, category),
    )


def _range(
    db: sqlite3.Connection, process: int, name: str, payload: int, category: int | None,
    start: int, end: int, domain: int | None = None,
) -> None:  # fmt: skip
    db.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, textId, domainId, category, int64Value, "
        "globalTid) VALUES (?, ?, 59, ?, ?, ?, ?, ?)",
        (start, end, ID[name], domain or OURS[process], category, payload, process + 5),
    )


def _call(db: sqlite3.Connection, process: int, name: str, start: int, correlation: int) -> None:
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)",
        (start, start + 1000, process + 6, correlation, ID[name]),
    )


def _kernel(
    db: sqlite3.Connection, process: int, start: int, length: int, correlation: int
) -> None:
    gemm = ID["gemm"]
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, globalPid, deviceId, contextId, "
        "streamId, correlationId, demangledName, shortName, registersPerThread, gridX, gridY, "
        "gridZ, blockX, blockY, blockZ, staticSharedMemory, dynamicSharedMemory, "
        "localMemoryPerThread, localMemoryTotal, gridId) "
        "VALUES (?, ?, ?, 0, 1, 7, ?, ?, ?, 32, 1, 1, 1, 128, 1, 1, 0, 0, 0, 0, 1)",
        (start, start + length, process, correlation, gemm, gemm),
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
