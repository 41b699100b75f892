"""TTFT and TPOT: percentiles over a cell's requests, and none from too few samples."""

import csv
import io
from dataclasses import replace

import pytest
from synthetic_run import change_batches, make_run, save_run, summarised, write_reports

from nwor_bench.analysis.analyse import MIN_SAMPLES, PERCENTILES, request_percentiles
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, RequestTimes
from nwor_bench.report.cells import REQUEST_NOTE, cell_section
from nwor_bench.report.document import Paragraph, Table


def times(requests: int = 2) -> RequestTimes:
    ttft = tuple(10.0 + place for place in range(requests))
    return RequestTimes(ttft, tuple(t / 4 for t in ttft))


def timed_run() -> RunData:
    return change_batches(make_run(blocks=5), lambda batch: True, request_times=times())


def batches(number: int) -> list[BatchRecord]:
    return [replace(make_run(blocks=1).batches[0], request_times=times()) for _ in range(number)]


@pytest.mark.parametrize(("point", "least"), [(95, 20), (99, 100)])
def test_a_percentile_needs_its_samples(point: int, least: int) -> None:
    assert MIN_SAMPLES[point] == least
    few = request_percentiles(batches(least // 2 - 1))
    enough = request_percentiles(batches(least // 2))
    assert few[f"ttft_ms_p{point}"] is None
    assert enough[f"ttft_ms_p{point}"] == pytest.approx(11.0)


def test_without_vllms_metrics_there_is_nothing() -> None:
    assert set(request_percentiles(make_run(blocks=1).batches).values()) == {None}


def test_a_cells_percentiles_are_over_its_timed_batches() -> None:
    run = timed_run()
    for cell in summarised(run):
        own = [b for b in run.batches if b.cell == cell.cell and b.phase == "timed"]
        expected = request_percentiles(own)
        assert {name: getattr(cell, name) for name in PERCENTILES} == expected


def test_an_invalid_cell_has_none() -> None:
    broken = change_batches(
        timed_run(), lambda b: b.nwor_mode == "stage" and b.phase == "gate", parity="INVALID"
    )
    found = {cell.label: cell.ttft_ms_p50 for cell in summarised(broken)}
    assert found["stage x off"] is None
    assert found["off x off"] is not None


@pytest.mark.slow
def test_batches_csv_has_the_percentiles_of_each_batch_last(tmp_path) -> None:
    save_run(timed_run(), tmp_path / "run")
    paths = write_reports(tmp_path / "run")
    rows = list(csv.DictReader(io.StringIO(paths.batches_csv.read_text(encoding="utf-8"))))
    assert tuple(rows[0])[-len(PERCENTILES) :] == PERCENTILES
    assert "request_times" not in rows[0]
    assert (rows[0]["ttft_ms_p50"], rows[0]["ttft_ms_p95"]) == ("10.5", "")
    cells = list(csv.DictReader(io.StringIO(paths.cells_csv.read_text(encoding="utf-8"))))
    assert tuple(name for name in cells[0] if name in PERCENTILES) == PERCENTILES


def test_the_report_shows_them_beside_window_time_only_if_measured() -> None:
    run = timed_run()
    section = cell_section(summarised(run))
    body = next(block for block in section.blocks if isinstance(block, Table))
    assert ("TTFT p50", "10.50") in zip(body.headers, body.rows[0], strict=True)
    assert "TTFT p95" not in body.headers  # ten requests a cell
    assert Paragraph(REQUEST_NOTE) in section.blocks
    assert Paragraph(REQUEST_NOTE) not in cell_section(summarised(make_run(blocks=2))).blocks
