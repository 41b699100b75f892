"""A real export of Nsight Systems, beside what the same run wrote down itself."""

import csv
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cut_nsys_export import KEPT, cut
from make_nsys_export import TABLES
from nsys_exports import DATA, unpacked

from nwor_bench.instruments.nsight.nsys_export import NsysExport, read_export
from nwor_bench.instruments.nsight.nsys_windows import nothing_of_the_gpu, windows_of

EXPORT = unpacked("nsys_cpu")


@pytest.fixture(scope="module")
def export() -> NsysExport:
    return read_export(EXPORT)


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    """Rows of the run's windows.csv."""
    with (DATA / "nsys_cpu.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_it_says_who_wrote_it(export: NsysExport) -> None:
    assert (export.version, export.schema) == ("2023.4.4.54", "3.7.2")


def test_every_window_is_found_in_its_cell_and_batch(
    export: NsysExport, records: list[dict[str, str]]
) -> None:
    found = [(w.cell, w.batch, w.window) for w in windows_of(export)]
    assert found == [(r["cell"], int(r["batch"]), int(r["window"])) for r in records]
    assert len({cell for cell, _, _ in found}) == 5


def test_a_window_lasts_as_long_as_the_run_says(
    export: NsysExport, records: list[dict[str, str]]
) -> None:
    """Two clocks of the host, the range a little wider: at most 10 % apart."""
    ended = 0
    for window, record in zip(windows_of(export), records, strict=True):
        if window.host_ms is not None:
            assert window.host_ms == pytest.approx(float(record["wall_ms"]), rel=0.1)
            ended += 1
    assert ended == len(records) - 5  # the last of each batch has no end


def test_payloads_are_what_ranges_say_they_are(
    export: NsysExport, records: list[dict[str, str]]
) -> None:
    """forward: tokens of the step, a request's own and its drafts; sample: requests."""
    for name, expected in (
        ("sample", [int(r["num_reqs"]) for r in records]),
        ("forward", [int(r["num_reqs"]) + int(r["draft_tokens"]) for r in records]),
    ):
        windows = [r for r in export.ranges if r.name == "window"]
        inside = [r for r in export.ranges if r.name == name]
        assert [
            next(i.payload for i in inside if w.start_ns <= i.start_ns <= w.end_ns) for w in windows
        ] == expected


def test_without_cuda_nothing_is_zero(export: NsysExport) -> None:
    assert nothing_of_the_gpu(export) is not None
    for window in windows_of(export):
        assert (window.counts, window.busy_ms, window.idle_ms, window.metrics) == (None,) * 4


def statements(database: sqlite3.Connection) -> Iterator[tuple[str, list[tuple[object, ...]]]]:
    for name in ("META_DATA_EXPORT", "StringIds", "NVTX_EVENTS"):
        columns = database.execute(f"PRAGMA table_info({name})").fetchall()
        yield name, columns


def test_the_made_up_export_has_the_real_ones_columns() -> None:
    with closing(sqlite3.connect(EXPORT)) as real, closing(sqlite3.connect(":memory:")) as made_up:
        made_up.executescript(TABLES)
        assert dict(statements(made_up)) == dict(statements(real))


def test_cutting_keeps_what_is_read(tmp_path: Path) -> None:
    cut(EXPORT, tmp_path / "again.sqlite")
    assert windows_of(read_export(tmp_path / "again.sqlite")) == windows_of(read_export(EXPORT))
    with closing(sqlite3.connect(EXPORT)) as database:
        names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        texts = {text for (text,) in database.execute("SELECT value FROM StringIds")}
    assert names == set(KEPT)
    assert not any("/" in text for text in texts)
