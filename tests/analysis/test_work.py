"""The GPU's own work beside the step: known where the host hides everything else."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import exp
from random import Random

import pytest
from interleaved_run import CONTROL, OFF, STAGE_GRAPH, Planted, group_windows, interleaved_run
from report_runs import gpu_run
from synthetic_run import analysed, summarised

from nwor_bench.analysis.effects import WORK_MS
from nwor_bench.analysis.groups import find_groups
from nwor_bench.analysis.phases import cell_phases
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, Phase, WindowRecord
from nwor_bench.report.answer import answer
from nwor_bench.report.facts import facts
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.run_report import build_document
from nwor_bench.stats.robust import robust_location

pytestmark = pytest.mark.slow  # whole runs

TRUTH = 0.985


@cache
def hidden(effect: float = TRUTH) -> RunData:
    """A slow host: a group's step scatters by about 11 %, its work by 0.3 %."""
    planted = Planted({STAGE_GRAPH.label: effect}, noise=0.2, host=0.0, work_noise=0.005)
    return interleaved_run(planted, 15, 80, seed=2)


def cell_of(run: RunData, label: str = STAGE_GRAPH.label) -> CellResult:
    return next(cell for cell in summarised(run) if cell.label == label)


def sentence(run: RunData) -> str:
    return answer(run.header, summarised(run)).sentence


def test_work_is_known_where_the_step_is_not() -> None:
    own, arm = cell_of(hidden()), cell_of(hidden(), "off x off (A/A)")
    assert own.verdict == "AMBIGUOUS"
    assert (own.half_width or 0) > 0.01
    for cell, truth in ((own, TRUTH), (arm, 1.0)):
        assert cell.work is not None
        assert cell.work.low < truth < cell.work.high < cell.work.low + 0.003


def test_the_answer_says_what_the_host_hides() -> None:
    assert re.search(r"GPU work -1\.\d %, hidden by this host\.$", sentence(hidden()))
    assert "GPU work +1." in sentence(hidden(1.015))
    found = analysed(hidden())
    assert re.search(r"^-1\.\d+ % \(95 %: ", dict(facts(found).entries)["GPU work"])
    text = render_markdown(build_document(found))
    assert "GPU work, % |" in text
    assert "a faster host, or more --requests, would let the step show it" in text


def test_the_split_is_of_the_work_if_it_was_timed() -> None:
    """A step that scatters by 20 % splits nothing; the work, known to 0.5 %, does."""
    effects = {STAGE_GRAPH.label: 0.97, CONTROL.label: 0.98}
    planted = Planted(effects, noise=0.2, host=0.0, work_noise=0.005)
    found = analysed(interleaved_run(planted, 15, 50, seed=2))
    (split,) = found.splits
    assert split.clock == WORK_MS
    for part, truth in ((split.attention, 0.98), (split.writes, 0.97 / 0.98)):
        assert abs(part.value - truth) < 2 * part.half_width < 0.004
    assert ": attention -2." in dict(facts(found).entries)["GPU work"]


def test_what_the_work_of_a_cell_does_not_answer() -> None:
    """The work may be equal; and without a check of the output it is no answer."""
    run = hidden()
    unchecked = replace(run, batches=tuple(replace(b, parity=None) for b in run.batches))
    for own in (hidden(1.0), unchecked):
        assert "hidden" not in sentence(own)


def noisy_groups(groups: int, rng: Random) -> Iterator[WindowRecord]:
    """Windows of off x off and stage x graph: steps scatter by 20 % a window, work by 0.5 %."""
    for number in range(groups):
        first, length = rng.choice((OFF, STAGE_GRAPH)), rng.choice((2, 4))
        for window in group_windows((OFF, STAGE_GRAPH), length, first):
            work = 8 * exp(rng.gauss(0, 0.005)) * (TRUTH if window.cell == STAGE_GRAPH else 1)
            device_ms = 10 * exp(rng.gauss(0, 0.2))
            times = {"device_ms": device_ms, "forward_ms": work - 1, "sample_ms": 1.0}
            yield replace(window, group=number, **times)


def test_the_interval_covers_the_truth_in_19_of_20_runs() -> None:
    inside, runs, rng = 0, 30, Random(7)
    for _ in range(runs):
        works = [group.work for group in find_groups(noisy_groups(50, rng)).counted]
        located = robust_location([work for work in works if work is not None])
        assert located is not None
        ratio = located.exp()
        inside += ratio.low <= TRUTH <= ratio.high
    assert inside >= 26  # fewer in 1 of 60 such tests, if 95 % is true


def test_without_a_devices_clock_there_is_no_work() -> None:
    """A CPU times phases on the host."""
    run = hidden()
    windows = tuple(replace(window, device_ms=None) for window in run.windows)
    for made in (replace(run, windows=windows), gpu_run()):
        assert {cell.work for cell in summarised(made)} == {None}


@pytest.mark.parametrize(("path", "mask_ms"), [("host", 0.0), ("graph", 0.5)])
def test_a_mask_that_the_host_decides_is_no_work(path: str, mask_ms: float) -> None:
    window = next(w for w in hidden().windows if w.cell == STAGE_GRAPH and w.group is not None)
    times = {"forward_ms": 4.0, "sample_ms": 1.0, "mask_ms": 0.5, "commit_ms": 0.25}
    made: WindowRecord = replace(window, scv_path=path, **times)
    assert made.work_ms == 5.25 + mask_ms


@pytest.mark.parametrize(
    ("times", "rest"),
    [
        ({"commit_ms": 0.25}, 1.5), ({"commit_ms": None}, 1.75),
        ({"forward_ms": None}, None), ({"wall_ms": None}, None),
    ],
)  # fmt: skip
def test_the_rest_of_a_windows_time_is_that_of_drafter_and_host(
    times: dict[str, float | None], rest: float | None
) -> None:
    """Rest of every probed window; not known without the forward's time or the window's own."""
    run = gpu_run(blocks=3)
    probed = {batch.batch for batch in run.batches if batch.phase == Phase.PROBE}
    whole = {
        "wall_ms": 5.0,
        "forward_ms": 3.0,
        "sample_ms": 0.25,
        "mask_ms": None,
        "commit_ms": 0.1,
    }
    windows = (replace(w, **whole | times) if w.batch in probed else w for w in run.windows)
    found = cell_phases(replace(run, windows=tuple(windows)))
    assert {row.rest_ms for row in found} == {rest}
