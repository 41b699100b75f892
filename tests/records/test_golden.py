"""Runs of older format versions stay readable. Each folder in golden/ was written by the version
that it is named for, on the stand-in engine: nothing in it is a measurement."""

import shutil
from pathlib import Path

import pandas as pd
import pytest
from synthetic_run import analysed, faults_of

from nwor_bench.analysis.analyse import analyse
from nwor_bench.analysis.findings.table import FindingKind
from nwor_bench.records.run_folder import KEPT_RECORDS_FILE
from nwor_bench.records.store import READABLE_VERSIONS, read_run
from nwor_bench.records.types import FORMAT_VERSION
from nwor_bench.report.files import write_files

GOLDEN = Path(__file__).parents[1] / "golden"
CELLS_OF_VERSION_1 = (
    "pair", "nwor_mode", "scv_mode", "batches", "windows", "requests", "output_tokens",
    "draft_tokens", "accepted_tokens", "acceptance_rate", "mean_accepted_per_window",
    "nwor_total_staged", "nwor_total_committed", "nwor_total_rejected", "nwor_stage_operations",
    "nwor_fallback_count", "bytes_staged", "bytes_committed", "bytes_avoided", "latency_ms_p50",
    "latency_ms_p95", "window_ms_mean", "tokens_per_s", "ratio_to_off", "ratio_ci_low",
    "ratio_ci_high", "parity",
)  # fmt: skip


def test_every_readable_version_but_todays_has_a_golden_run():
    versions = {int(path.name.removeprefix("version-")) for path in GOLDEN.iterdir()}
    assert versions == set(READABLE_VERSIONS) - {FORMAT_VERSION}


def test_version_1_reads_without_an_arm():
    run = read_run(GOLDEN / "version-1")
    assert run.header.format_version == 1
    assert (len(run.batches), len(run.windows), run.warnings) == (31, 93, ())
    assert {batch.arm for batch in run.batches} == {None}
    assert {len(batch.conditions) for batch in run.batches} == {0}
    cells = analyse(run).cells
    assert len(cells) == 6
    assert faults_of(run) == []
    assert {cell.parity for cell in cells} == {"reference", "exact"}
    assert FindingKind.AA_MISSING in {finding.kind for finding in analysed(run, cells).findings}


def test_its_counts_are_those_that_its_own_version_summed():
    run = read_run(GOLDEN / "version-1")
    names = ("draft_tokens", "accepted_tokens", "nwor_total_staged", "nwor_total_committed",
             "nwor_stage_operations", "latency_ms_p50", "tokens_per_s")  # fmt: skip
    for then, now in zip(run.header.cells, analyse(run).cells, strict=True):
        assert [then[name] for name in names] == [getattr(now, name) for name in names]


@pytest.mark.slow  # a whole report
@pytest.mark.parametrize("version", sorted(set(READABLE_VERSIONS) - {FORMAT_VERSION}))
def test_its_reports_can_be_made_anew(version, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(GOLDEN / f"version-{version}", folder)
    before = (folder / KEPT_RECORDS_FILE).read_bytes()
    run = read_run(folder)
    paths = write_files(folder, analyse(run))
    assert (folder / KEPT_RECORDS_FILE).read_bytes() == before
    assert read_run(folder).header.format_version == version
    columns = list(pd.read_csv(paths.cells_csv).columns)
    assert columns[: len(CELLS_OF_VERSION_1)] == list(CELLS_OF_VERSION_1)
    assert "golden" not in paths.markdown.read_text()
