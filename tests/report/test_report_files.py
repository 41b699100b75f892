"""The files of a run folder: the contract's columns, nothing invented, the same every time."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused
from synthetic_run import make_run, save_run, summarised, write_reports

from nwor_bench.errors import ConfigError, StoreError
from nwor_bench.records.files import RECORDS_FILE
from nwor_bench.records.store import read_run
from nwor_bench.records.types import CellResult, RunStatus, WindowRecord
from nwor_bench.report.load import frame_of, to_csv

pytestmark = pytest.mark.slow  # whole runs


# From the design's output contract.


@pytest.fixture
def folder(tmp_path):
    save_run(make_run(), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One run's report files, for tests that only read them."""
    folder = tmp_path_factory.mktemp("reports") / "run"
    save_run(make_run(), folder)
    return read_run(folder), write_reports(folder)


def rows(path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_values_survive_the_csv_unrounded(reports):
    run, paths = reports
    for row, batch in zip(rows(paths.batches_csv), run.batches, strict=True):
        assert float(row["latency_ms"]) == batch.latency_ms
        assert row["token_digests"].split(";") == list(batch.token_digests)
        assert json.loads(row["scv_counters"]) == batch.scv_counters
        assert row["parity"] == (batch.parity or "")


def test_reasons_of_scv_stand_beside_those_of_nwor(reports):
    reasons = {row["fallback_reason"] for row in rows(reports[1].windows_csv)}
    assert {"", "scv:no_cuda", "mixed_batch"} <= reasons
    assert any(reason == "mixed_batch; scv:no_cuda" for reason in reasons)


def test_whole_numbers_stay_whole_beside_missing_ones():
    windows = make_run(blocks=1, windows=4).windows
    text = to_csv(frame_of(WindowRecord, [replace(windows[0], bytes_staged=None), windows[1]]))
    found = [row["bytes_staged"] for row in csv.DictReader(io.StringIO(text))]
    assert found == ["", str(windows[1].bytes_staged or "")]
    assert ".0," not in text.split("\n")[2].split(windows[1].pair)[0]


def test_awkward_text_survives_the_csv():
    cell = replace(summarised(make_run())[0], reason='a "b", c\n; d=é', pair="x,y")
    (row,) = csv.DictReader(io.StringIO(to_csv(frame_of(CellResult, [cell]))))
    assert (row["reason"], row["pair"]) == ('a "b", c\n; d=é', "x,y")


def test_no_records_are_only_a_header():
    assert to_csv(frame_of(WindowRecord, [])).count("\n") == 1


def test_a_torn_run_is_reported_with_its_warning(folder):
    records = folder / RECORDS_FILE
    records.write_bytes(records.read_bytes()[:-5])
    paths = write_reports(folder)
    assert "last line" in json.loads(paths.run_json.read_text())["warnings"][0]
    for path in (paths.markdown, paths.html):
        text = path.read_text()
        assert text.index("was not written to the end") < text.index("How sure is that?")


def test_a_run_without_batches_still_gets_its_reports(tmp_path):
    run = make_run()
    empty = replace(
        run,
        batches=(),
        windows=(),
        header=run.header.model_copy(update={"status": RunStatus.PARTIAL}),
    )
    save_run(empty, tmp_path / "run")
    paths = write_reports(tmp_path / "run")
    assert "Nothing was measured." in paths.markdown.read_text()
    assert rows(paths.cells_csv) == []


def test_no_run_and_no_place_to_write_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError):
        write_reports(tmp_path / "nothing")
    (folder / "cells.csv").mkdir()
    with refused(folder / "cells.csv", StoreError, cause=OSError):
        write_reports(folder)


def test_timed_windows_add_up_to_the_cells(reports):
    _, paths = reports
    windows = rows(paths.windows_csv)
    assert list(windows[0])[-2:] == ["phase", "path"]
    assert {row["phase"] for row in windows if row["block"] == "0"} == {"gate"}
    for cell in rows(paths.cells_csv):
        own = [
            row
            for row in windows
            if row["phase"] == "timed"
            and (row["nwor_mode"], row["scv_mode"], row["arm"])
            == (cell["nwor_mode"], cell["scv_mode"], cell["arm"])
        ]
        assert len(own) == int(cell["windows"])
        assert sum(int(row["draft_tokens"]) for row in own) == int(cell["draft_tokens"])


KEPT_REPORTS = sorted((Path(__file__).parents[2] / "sweeps" / "results").rglob("report.md"))


def cited(text: str) -> set[str]:
    return set(re.findall(r"[\w./-]+\.(?:html|csv|json|jsonl|log|md)\b", text))


def test_report_md_cites_files_that_are_there(tmp_path):
    save_run(make_run(aa=True), tmp_path)
    text = write_reports(tmp_path).markdown.read_text()
    assert "report.html" in cited(text)
    assert {name for name in cited(text) if not (tmp_path / name).is_file()} == set()


@pytest.mark.parametrize("path", KEPT_REPORTS, ids=lambda path: path.parent.name)
def test_kept_reports_cite_files_that_are_there(path):
    assert {name for name in cited(path.read_text()) if not (path.parent / name).is_file()} == set()
