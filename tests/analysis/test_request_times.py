"""TTFT and TPOT: percentiles over a cell's requests, and none from too few samples."""

import csv
import io
from dataclasses import replace

import pytest
from synthetic_run import change_batches, make_run, save_run, summarised, write_reports

from nwor_bench.analysis.analyse import MIN_SAMPLES, PERCENTILES, request_percentiles
from nwor_bench.records.store import RunData
from nwor_bench.records.types import RequestTimes
from nwor_bench.report.cells import REQUEST_NOTE, cell_section
from nwor_bench.report.document import Paragraph, Table


def times(requests: int = 2) -> RequestTimes:
    ttft = tuple(10.0 + place for place in range(requests))
    return RequestTimes(ttft, tuple(t / 4 for t in ttft))


def timed_run() -> RunData:
    return change_batches(make_run(blocks=5), lambda batch: True, request_times=times())


@pytest.mark.parametrize(("point", "least"), [(95, 20), (99, 100)])
def test_a_percentile_needs_its_samples(point: int, least: int) -> None:
    assert MIN_SAMPLES[point] == least
    own = [replace(make_run(blocks=1).batches[0], request_times=times())] * (least // 2)
    assert request_percentiles(own[1:])[f"ttft_ms_p{point}"] is None
    assert request_percentiles(own)[f"ttft_ms_p{point}"] == pytest.approx(11.0)
    assert set(request_percentiles(make_run(blocks=1).batches).values()) == {None}


def test_a_cells_percentiles_are_over_its_timed_batches() -> None:
    run = timed_run()
    for cell in summarised(run):
        own = [b for b in run.batches if b.cell == cell.cell and b.phase == "timed"]
        expected = request_percentiles(own)
        assert {name: getattr(cell, name) for name in PERCENTILES} == expected
    broken = change_batches(run, lambda b: b.nwor_mode == "stage", parity="INVALID")
    assert {cell.ttft_ms_p50 is None for cell in summarised(broken) if "stage" in cell.label} == {
        True
    }


@pytest.mark.slow
def test_files_and_pages_have_them_if_they_were_measured(tmp_path) -> None:
    run = timed_run()
    save_run(run, tmp_path / "run")
    paths = write_reports(tmp_path / "run")
    batches, cells = (
        list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        for path in (paths.batches_csv, paths.cells_csv)
    )
    assert tuple(batches[0])[-len(PERCENTILES) :] == PERCENTILES
    assert "request_times" not in batches[0]
    assert (batches[0]["ttft_ms_p50"], batches[0]["ttft_ms_p95"]) == ("10.5", "")
    assert tuple(name for name in cells[0] if name in PERCENTILES) == PERCENTILES
    section = cell_section(summarised(run))
    body = next(block for block in section.blocks if isinstance(block, Table))
    assert ("TTFT p50", "10.50") in zip(body.headers, body.rows[0], strict=True)
    assert "TTFT p95" not in body.headers  # ten requests a cell
    assert Paragraph(REQUEST_NOTE) in section.blocks
    assert Paragraph(REQUEST_NOTE) not in cell_section(summarised(make_run(blocks=2))).blocks
