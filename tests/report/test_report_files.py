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


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """One run's report files, for tests that only read them."""
    folder = tmp_path_factory.mktemp("reports") / "run"
    save_run(make_run(aa=True), folder)
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
    reasons = {row["fallback_reason"] for row in rows(paths.windows_csv)}
    assert {"", "scv:no_cuda", "mixed_batch", "mixed_batch; scv:no_cuda"} <= reasons


def test_missing_numbers_and_awkward_text_survive_the_csv():
    windows = make_run(blocks=1, windows=4).windows
    text = to_csv(frame_of(WindowRecord, [replace(windows[0], bytes_staged=None), windows[1]]))
    found = [row["bytes_staged"] for row in csv.DictReader(io.StringIO(text))]
    assert found == ["", str(windows[1].bytes_staged or "")]
    assert ".0," not in text.split("\n")[2].split(windows[1].pair)[0]
    cell = replace(summarised(make_run())[0], reason='a "b", c\n; d=é', pair="x,y")
    (row,) = csv.DictReader(io.StringIO(to_csv(frame_of(CellResult, [cell]))))
    assert (row["reason"], row["pair"]) == ('a "b", c\n; d=é', "x,y")
    assert to_csv(frame_of(WindowRecord, [])).count("\n") == 1


def test_a_torn_run_and_an_empty_one_get_their_reports(tmp_path):
    run = make_run()
    save_run(run, tmp_path / "torn")
    records = tmp_path / "torn" / RECORDS_FILE
    records.write_bytes(records.read_bytes()[:-5])
    paths = write_reports(tmp_path / "torn")
    assert "last line" in json.loads(paths.run_json.read_text())["warnings"][0]
    for path in (paths.markdown, paths.html):
        text = path.read_text()
        assert text.index("was not written to the end") < text.index("Time per window over")
    header = run.header.model_copy(update={"status": RunStatus.PARTIAL})
    save_run(replace(run, batches=(), windows=(), header=header), tmp_path / "empty")
    paths = write_reports(tmp_path / "empty")
    assert "Nothing was measured." in paths.markdown.read_text()
    assert rows(paths.cells_csv) == []


def test_a_failed_run_says_why_and_no_more(tmp_path):
    run = make_run()
    header = run.header.model_copy(update={"status": RunStatus.FAILED})
    why = f"vLLM did not start: no luck{' at all' * 20}; write a smaller --max-model-len"
    event = {"event": "failed", "error": why}
    save_run(replace(run, batches=(), windows=(), header=header, events=(event,)), tmp_path)
    page = write_reports(tmp_path).markdown.read_text()
    lead, *sections = page.split("\n## ")
    assert "**FAILED: vLLM did not start: no luck at all" in lead
    assert why in " ".join(lead.split())
    assert [section.split("\n")[0] for section in sections] == []
    html = (tmp_path / "report.html").read_text()
    assert re.findall(r'<h2 id="[^"]*">([^<]*)', html) == ["This run", "To repeat this run"]


def test_no_run_and_no_place_to_write_are_refused(tmp_path):
    with pytest.raises(ConfigError):
        write_reports(tmp_path / "nothing")
    save_run(make_run(), tmp_path)
    (tmp_path / "cells.csv").mkdir()
    with refused(tmp_path / "cells.csv", StoreError, cause=OSError):
        write_reports(tmp_path)


def test_timed_windows_add_up_to_the_cells(reports):
    _, paths = reports
    windows = rows(paths.windows_csv)
    assert list(windows[0])[-2:] == ["phase", "path"]
    assert {row["phase"] for row in windows if row["block"] == "0"} == {"gate"}
    names = ("nwor_mode", "scv_mode", "arm")
    for cell in rows(paths.cells_csv):
        own = [row for row in windows if row["phase"] == "timed"
               and [row[name] for name in names] == [cell[name] for name in names]]  # fmt: skip
        assert len(own) == int(cell["windows"])
        assert sum(int(row["draft_tokens"]) for row in own) == int(cell["draft_tokens"])


KEPT_REPORTS = sorted((Path(__file__).parents[2] / "sweeps" / "results").rglob("report.md"))


@pytest.mark.parametrize("path", [None, *KEPT_REPORTS], ids=lambda p: p and p.parent.name)
def test_reports_cite_files_that_are_there(path, reports):
    path = path or reports[1].markdown
    cited = set(re.findall(r"[\w./-]+\.(?:html|csv|json|jsonl|log|md)\b", path.read_text()))
    assert "report.html" in cited or path in KEPT_REPORTS
    assert {name for name in cited if not (path.parent / name).is_file()} == set()
