"""A kept run stays readable, counts what its writer counted, and gives its reports anew.

tests/golden/run was written on the stand-in engine before cells had arms: nothing in it is a
measurement."""

import shutil
from pathlib import Path

import pytest
from synthetic_run import analysed, faults_of

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.findings.table import FindingKind
from nwor_bench.records.run_folder import KEPT_RECORDS_FILE
from nwor_bench.records.store import read_run
from nwor_bench.report.files import write_files

GOLDEN = Path(__file__).parents[1] / "golden" / "run"


def test_it_reads_without_an_arm():
    run = read_run(GOLDEN)
    assert (len(run.batches), len(run.windows), run.warnings) == (31, 93, ())
    assert {batch.arm for batch in run.batches} == {None}
    assert {len(batch.conditions) for batch in run.batches} == {0}
    cells = analyse(run).cells
    assert len(cells) == 6
    assert faults_of(run) == []
    assert {cell.parity for cell in cells} == {"reference", "exact"}
    assert FindingKind.AA_MISSING in {finding.kind for finding in analysed(run, cells).findings}


def test_its_counts_are_those_that_its_own_version_summed():
    run = read_run(GOLDEN)
    names = ("draft_tokens", "accepted_tokens", "nwor_total_staged", "nwor_total_committed",
             "nwor_stage_operations", "latency_ms_p50", "tokens_per_s")  # fmt: skip
    for then, now in zip(run.header.cells, analyse(run).cells, strict=True):
        assert [then[name] for name in names] == [getattr(now, name) for name in names]


@pytest.mark.slow  # a whole report
def test_its_reports_can_be_made_anew(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN, folder)
    before = (folder / KEPT_RECORDS_FILE).read_bytes()
    paths = write_files(folder, analyse(read_run(folder)))
    assert (folder / KEPT_RECORDS_FILE).read_bytes() == before
    assert "golden" not in paths.markdown.read_text()
