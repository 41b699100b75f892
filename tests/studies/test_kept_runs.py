"""The runs that are kept whole: their reports can be made again, and say what was kept."""

import json
import shutil
from pathlib import Path

import pytest

from nwor_bench.analysis.analyse import analyse
from nwor_bench.records.run_folder import KEPT_RECORDS_FILE, RUN_FILE
from nwor_bench.records.store import read_run
from nwor_bench.report.files import write_files

KEPT = Path(__file__).parents[2] / "sweeps" / "results" / "h200" / "kept"
RUNS = sorted(path.parent for path in KEPT.glob(f"*/{RUN_FILE}"))


def test_two_runs_are_kept_and_one_has_its_page() -> None:
    assert len(RUNS) == 2
    assert [run.name for run in RUNS if (run / "report.html").is_file()] == [RUNS[0].name]


@pytest.mark.slow  # two whole reports
@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_its_report_is_made_again_from_its_records(folder: Path, tmp_path: Path) -> None:
    for name in (RUN_FILE, KEPT_RECORDS_FILE):
        shutil.copy(folder / name, tmp_path / name)
    kept = json.loads((folder / RUN_FILE).read_text())["cells"]
    run = read_run(tmp_path)
    cells = analyse(run).cells
    assert [(c.label, c.verdict, c.windows) for c in cells] == [
        (
            f"{c['nwor_mode']} x {c['scv_mode']}" + (f" ({c['arm']})" if c["arm"] else ""),
            c["verdict"],
            c["windows"],
        )
        for c in kept
    ]
    for cell, before in zip(cells, kept, strict=True):
        assert cell.ratio_to_off == pytest.approx(before["ratio_to_off"])
    paths = write_files(tmp_path, analyse(run))
    assert paths.html.stat().st_size > 10_000
    for path in (paths.html, paths.markdown):
        if (folder / path.name).is_file():
            assert path.read_bytes() == (folder / path.name).read_bytes()
    assert "How sure is that?" in paths.markdown.read_text()
