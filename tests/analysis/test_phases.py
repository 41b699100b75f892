"""A window's time by phase: what no phase explains has a name of its own."""

from dataclasses import replace

import pytest
from report_runs import gpu_run

from nwor_bench.analysis.phases import cell_phases
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase

pytestmark = pytest.mark.slow  # whole runs


def probed_with(**times: float | None) -> RunData:
    """A run in which every probed window has these times."""
    run = gpu_run(blocks=3)
    probed = {batch.batch for batch in run.batches if batch.phase == Phase.PROBE}
    windows = (replace(w, **times) if w.batch in probed else w for w in run.windows)
    return replace(run, windows=tuple(windows))


def test_the_rest_is_the_time_of_drafter_and_host() -> None:
    for commit_ms, rest in ((0.25, 1.5), (None, 1.75)):
        times = {"wall_ms": 5.0, "forward_ms": 3.0, "sample_ms": 0.25, "mask_ms": None}
        found = cell_phases(probed_with(**times, commit_ms=commit_ms))
        assert {row.rest_ms for row in found} == {rest}


def test_without_a_forward_s_time_the_rest_is_not_known() -> None:
    for name in ("forward_ms", "wall_ms"):
        assert {row.rest_ms for row in cell_phases(probed_with(**{name: None}))} == {None}
