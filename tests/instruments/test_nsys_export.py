"""Nsight Systems' export by window: the made-up one in tests/data, whose sums are known."""

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_nsys_export import CALLS, HARNESS, WORKER, write
from nsys_exports import unpacked
from refusals import refused

from nwor_bench.instruments.nsight.nsys_export import read_export
from nwor_bench.instruments.nsight.nsys_windows import NsysWindow, nothing_of_the_gpu, windows_of

EXPORT = unpacked("nsys_windows")


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return Path(shutil.copy(EXPORT, tmp_path / "export.sqlite"))


def change(path: Path, *statements: str) -> list[NsysWindow]:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return windows_of(read_export(path))


def test_the_kept_export_is_what_its_script_writes(tmp_path: Path) -> None:
    write(tmp_path / "anew.sqlite")

    def dump(path: Path) -> list[str]:
        with closing(sqlite3.connect(path)) as database:
            return list(database.iterdump())

    assert dump(tmp_path / "anew.sqlite") == dump(EXPORT)


def test_windows_are_joined_to_their_cell_and_batch(export: Path) -> None:
    found = read_export(export)
    assert found.schema == "3.7.2"
    windows = windows_of(found)
    places = [(w.cell, w.batch, w.window) for w in windows]
    assert places == [
        *(("off x off", 0, number) for number in range(3)),
        *(("stage x graph", 1, number) for number in range(3)),
    ]
    assert [w.host_ms for w in windows] == [10.0, 10.0, None, 10.0, 10.0, None]


def test_calls_are_counted_by_window(export: Path) -> None:
    windows = windows_of(read_export(export))
    for window, category in ((windows[0], 1), (windows[1], 1), (windows[3], 2)):
        names = CALLS[category]
        assert window.counts == {
            "kernel_launches": sum("LaunchKernel" in name for name in names),
            "graph_launches": sum("GraphLaunch" in name for name in names),
            "host_syncs": sum("Synchronize" in name for name in names),
            "async_copies": sum("MemcpyAsync" in name for name in names),
        }
    assert windows[2].counts is None  # nobody knows where the last one of a batch ends


def test_busy_and_idle_fill_the_time_to_the_next_windows_work(export: Path) -> None:
    windows = windows_of(read_export(export))
    # Category 1 launches at places 0, 1 and 2: kernels of 2 ms from 2, 3 and 4 ms, so to 6 ms.
    assert windows[0].busy_ms == pytest.approx(4.0)
    assert windows[0].idle_ms == pytest.approx(6.0)
    for window in windows:
        if window.busy_ms is not None and window.idle_ms is not None:
            assert window.busy_ms + window.idle_ms == pytest.approx(10.0)
    assert windows[2].idle_ms is None
    assert windows[5].idle_ms is None


def test_metrics_are_means_of_the_samples_within(export: Path) -> None:
    windows = windows_of(read_export(export))
    read, written = "DRAM Read Bandwidth [Throughput %]", "DRAM Write Bandwidth [Throughput %]"
    assert windows[1].metrics == {read: 41.0, written: 0.0}
    assert windows[4].metrics == {read: 41.0, written: 10.0}


def test_what_was_not_traced_is_none(export: Path) -> None:
    windows = change(export, "DROP TABLE GPU_METRICS", "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    assert all(w.metrics is None and w.busy_ms is None and w.idle_ms is None for w in windows)
    assert windows[0].counts is not None
    windows = change(export, "DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
    assert all(w.counts is None for w in windows)


def test_another_domains_ranges_are_not_ours(export: Path) -> None:
    names = {r.name for r in read_export(export).ranges}
    assert names == {"sweep", "batch", "window"}


def test_an_arm_is_named_by_its_batch(export: Path) -> None:
    """A worker does not know the A/A arm from off x off: its batch does."""
    windows = change(
        export,
        "UPDATE NVTX_EVENTS SET text = 'off x off (A/A)' "
        f"WHERE eventType = 33 AND category = 1 AND globalTid = {HARNESS + 5}",
    )
    assert [window.cell for window in windows[:3]] == ["off x off (A/A)"] * 3


def test_every_process_has_its_own_windows(export: Path) -> None:
    """A second rank: the same windows again, 1 ms later, under the same numbers of calls."""
    before = windows_of(read_export(export))
    tables = {"NVTX_EVENTS": "globalTid", "CUPTI_ACTIVITY_KIND_RUNTIME": "globalTid",
              "CUPTI_ACTIVITY_KIND_KERNEL": "globalPid"}  # fmt: skip
    after = change(export, *(second_worker(export, *table) for table in tables.items()))
    assert after[: len(before)] == before
    assert [window.process for window in after[len(before) :]] == [52] * len(before)
    assert [replace(w, process=42, metrics=None) for w in after[len(before) :]] == [
        replace(w, metrics=None) for w in before
    ]


def second_worker(path: Path, table: str, process: str) -> str:
    """Copy the worker's rows of a table to another process, 10 further on, 1 ms later."""
    with closing(sqlite3.connect(path)) as database:
        names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    changed = {process: f"{process} + {10 << 24}", "start": "start + 1000000",
               "end": "end + 1000000"}  # fmt: skip
    columns = ", ".join(changed.get(name, name) for name in names)
    return (
        f"INSERT INTO {table} SELECT {columns} FROM {table} WHERE {process} >> 24 = {WORKER >> 24}"
    )


def test_tables_without_a_row_are_none_too(export: Path) -> None:
    """`nsys export --lazy false` makes all tables, whatever was traced."""
    windows = change(
        export,
        "DELETE FROM GPU_METRICS",
        "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME",
        "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL",
    )
    assert {(w.counts, w.busy_ms, w.idle_ms, w.metrics) for w in windows} == {(None,) * 4}


def test_no_cuda_at_all_is_one_sentence(export: Path) -> None:
    assert nothing_of_the_gpu(read_export(export)) is None
    change(export, "DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME")
    assert nothing_of_the_gpu(read_export(export)) is None
    change(export, "DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    assert "no CUDA call" in str(nothing_of_the_gpu(read_export(export)))


def test_unregistered_texts_read_alike(export: Path) -> None:
    before = windows_of(read_export(export))
    after = change(
        export,
        "UPDATE NVTX_EVENTS SET text = (SELECT value FROM StringIds WHERE id = textId), "
        "textId = NULL WHERE textId IS NOT NULL",
    )
    assert after == before


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("DROP TABLE NVTX_EVENTS", {"naming": "no NVTX_EVENTS"}),
        ("ALTER TABLE NVTX_EVENTS DROP COLUMN domainId", {"cause": sqlite3.Error}),
        (
            "UPDATE META_DATA_EXPORT SET value = '4' WHERE name LIKE '%MAJOR'",
            {"naming": "only 3.x"},
        ),
        ("DELETE FROM NVTX_EVENTS WHERE eventType = 75", {"naming": "the domain 'nwor-bench'"}),
        (
            "DELETE FROM NVTX_EVENTS WHERE textId = (SELECT id FROM StringIds "
            "WHERE value = 'window')",
            {"naming": "--capture sweep"},
        ),
    ],
)
def test_an_export_that_cannot_be_used_is_refused(
    export: Path, statement: str, wanted: dict[str, Any]
) -> None:
    with refused(export, **wanted) as refusal:
        change(export, statement)
    assert refusal.value.exit_code == 2


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("this is no database, whatever its name says" * 40)
    with refused("x.sqlite", cause=sqlite3.Error):
        read_export(tmp_path / "x.sqlite")
    with refused(tmp_path / "y.sqlite", cause=None):
        read_export(tmp_path / "y.sqlite")


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41b", "a b"])
def test_an_export_of_any_name_is_read_and_nothing_is_made_beside_it(
    export: Path, name: str
) -> None:
    """SQLite takes `#`, `?` and `%` in a URI for more than letters."""
    path = export.rename(export.with_name(f"{name}.sqlite"))
    assert len(windows_of(read_export(path))) == 6
    assert list(path.parent.iterdir()) == [path]


def test_an_export_that_does_not_open_is_refused(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with refused(export, cause=sqlite3.OperationalError):
        read_export(export)
