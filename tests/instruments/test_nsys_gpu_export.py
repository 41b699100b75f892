"""A real export of an H200 under full CUDA graphs, beside what else is known of its windows."""

import csv
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_nsys_export import CALLS, WORK
from make_nsys_export import TABLES
from nsys_exports import DATA, unpacked

from nwor_bench.instruments.nsight.nsys_export import read_export
from nwor_bench.instruments.nsight.nsys_windows import NsysWindow, lost_calls, settled, windows_of

EXPORT = unpacked("nsys_gpu")

KINETO = (
    {"kernel_launches": 100, "graph_launches": 3, "host_syncs": 1, "async_copies": 14},
    {"kernel_launches": 101, "graph_launches": 3, "host_syncs": 1, "async_copies": 15},
)
"""PyTorch's own profiler on windows of stage x graph of another run with the same shape (see
sweeps/studies/profiler-cross-check/nsys.md): without and with new blocks in vLLM's block table."""

DRIVER_COPY = "cuMemcpyDtoDAsync_v2"
"""A copy by the driver's own call: PyTorch's profiler does not record it."""


@pytest.fixture(scope="module")
def records() -> list[dict[str, str]]:
    """Rows of the run's windows.csv."""
    with (DATA / "nsys_gpu.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def ended() -> list[NsysWindow]:
    """Window 3 of stage x off, and of stage x graph."""
    return [w for w in windows_of(read_export(EXPORT)) if w.host_ms is not None]


def query(text: str, *values: Any, path: Path = EXPORT) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(text, values).fetchall()


def spans() -> list[tuple[int, int]]:
    """Start of window 3 and of window 4, batch by batch."""
    starts = query(
        "SELECT e.start FROM NVTX_EVENTS e JOIN StringIds s ON s.id = e.textId "
        "WHERE e.eventType = 59 AND s.value = 'window' ORDER BY e.start"
    )
    return [(starts[place][0], starts[place + 1][0]) for place in (0, 2)]


def work_of(start: int, end: int) -> list[tuple[int, int, int | None]]:
    """Start, end and graph node of all that calls in a span of time put on the GPU."""
    return [
        row
        for table in WORK
        for row in query(
            f"SELECT w.start, w.end, w.graphNodeId FROM {table} w JOIN {CALLS} r "
            "ON r.correlationId = w.correlationId WHERE r.start >= ? AND r.start < ?",
            start, end,
        )
    ]  # fmt: skip


def names_of(start: int, end: int) -> list[str]:
    return [
        name
        for (name,) in query(
            f"SELECT s.value FROM {CALLS} r JOIN StringIds s ON s.id = r.nameId "
            "WHERE r.start >= ? AND r.start < ?", start, end,
        )
    ]  # fmt: skip


def test_windows_are_the_runs_own(ended: list[NsysWindow], records: list[dict[str, str]]) -> None:
    found = [(w.cell, w.batch, w.window, w.requests) for w in windows_of(read_export(EXPORT))]
    assert found == [
        (r["cell"], int(r["batch"]), int(r["window"]), int(r["num_reqs"])) for r in records
    ]
    own = {(int(r["batch"]), int(r["window"])): float(r["wall_ms"]) for r in records}
    for w in ended:
        assert w.batch is not None
        assert w.window is not None
        assert w.host_ms == pytest.approx(own[w.batch, w.window], rel=0.01)


def test_every_launch_outside_of_graphs_is_a_kernel(ended: list[NsysWindow]) -> None:
    for w, span in zip(ended, spans(), strict=True):
        kernels = query(
            f"SELECT COUNT(*) FROM {WORK[0]} k JOIN {CALLS} r USING (correlationId) "
            "WHERE k.graphNodeId IS NULL AND r.start >= ? AND r.start < ?", *span,
        )  # fmt: skip
        assert w.counts is not None
        assert w.counts["kernel_launches"] == kernels[0][0]


def test_work_inside_graphs_belongs_to_the_window_of_their_launch(
    ended: list[NsysWindow],
) -> None:
    for w, span in zip(ended, spans(), strict=True):
        work = work_of(*span)
        assert w.gpu_operations == len(work)
        assert sum(node is not None for *_, node in work) > 300  # 28 layers and a drafter


def test_launches_are_those_of_pytorchs_profiler(ended: list[NsysWindow]) -> None:
    """It sees the runtime's calls only: the driver's own copy comes on top."""
    staged, graph = ended
    driver = names_of(*spans()[1]).count(DRIVER_COPY)
    assert driver == 1
    assert graph.counts is not None
    assert {**graph.counts, "async_copies": graph.counts["async_copies"] - driver} in KINETO
    assert staged.counts is not None
    assert staged.counts["graph_launches"] == graph.counts["graph_launches"] - 1  # validation
    assert staged.counts["host_syncs"] == graph.counts["host_syncs"] + 1  # its mask read back


def test_busy_and_idle_by_ticking_off_every_ns(ended: list[NsysWindow]) -> None:
    for w, (start, end) in zip(ended, spans(), strict=True):
        work = work_of(start, end)
        begins = min(item[0] for item in work)
        until = min(item[0] for item in work_of(end, end + 1_000_000))
        ticks = np.zeros(until - begins, dtype=bool)
        for first, last, _ in work:
            ticks[first - begins : max(last - begins, 0)] = True
        assert w.busy_ms == pytest.approx(int(ticks.sum()) / 1e6)
        assert w.idle_ms == pytest.approx(int((~ticks).sum()) / 1e6)


def test_a_copy_to_memory_that_is_not_pinned_is_a_wait(ended: list[NsysWindow]) -> None:
    """stage x off reads its mask on the host: CUDA waits in the copy, not in the sync after it."""
    staged, graph = ended
    start, end = spans()[0]
    ((copied,),) = query(
        f"SELECT SUM(r.end - r.start) FROM {CALLS} r JOIN {WORK[1]} m USING (correlationId) "
        "WHERE m.copyKind = 2 AND m.dstKind = 0 AND r.start >= ? AND r.start < ?", start, end,
    )  # fmt: skip
    assert copied > 1_000_000
    assert staged.wait_ms is not None
    assert copied / 1e6 < staged.wait_ms < copied / 1e6 + 0.1
    assert graph.wait_ms is not None
    assert graph.wait_ms < 0.1


def test_calls_that_were_lost_are_not_zero(tmp_path: Path) -> None:
    """As where Nsight Systems met a call of CUDA that it did not know, and heard no more."""
    path = Path(shutil.copy(EXPORT, tmp_path / "lost.sqlite"))
    middle = (spans()[1][0] + spans()[1][1]) // 2
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"DELETE FROM {CALLS} WHERE start > ?", (middle,))
        database.commit()
    export = read_export(path)
    whole, cut_short = [w for w in windows_of(export) if w.host_ms is not None]
    assert whole.counts is not None
    assert whole.idle_ms is not None
    assert (cut_short.counts, cut_short.wait_ms, cut_short.gpu_operations) == (None,) * 3
    assert (cut_short.busy_ms, cut_short.idle_ms) == (None, None)
    assert "1 of 4 windows" in str(lost_calls(export, windows_of(export)))
    real = read_export(EXPORT)
    assert lost_calls(real, windows_of(real)) is None


def test_means_are_over_full_windows() -> None:
    def window(number: int, requests: int, host_ms: float | None = 1.0) -> NsysWindow:
        return NsysWindow(
            "a", 1, number, requests, host_ms, None, None, None, None, None, None, process=5
        )

    windows = [*(window(n, 8) for n in range(5)), window(5, 6), window(6, 2, None)]
    assert [w.window for w in settled(windows)] == [2, 3, 4]


def test_the_made_up_export_has_the_real_ones_columns() -> None:
    with closing(sqlite3.connect(":memory:")) as made_up:
        made_up.executescript(TABLES)
        for table in (CALLS, *WORK):
            columns = [row[1:4] for row in made_up.execute(f"PRAGMA table_info({table})")]
            assert columns == [row[1:4] for row in query(f"PRAGMA table_info({table})")]
