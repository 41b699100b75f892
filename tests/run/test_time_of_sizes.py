"""Batch sizes of `worth` for which the time budget has no room, on a stand-in engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, FakeFactory, accept_arguments
from golden_files import GOLDEN
from test_budget import Clock
from toy_run import Runner, of_phase

from nwor_bench.analysis.analyse import analyse
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.errors import ExitCode
from nwor_bench.records.files import LEFT_OUT
from nwor_bench.records.store import read_run
from nwor_bench.records.types import Phase
from nwor_bench.report.sweep import swept_worths
from nwor_bench.report.worth_answer import worth_answer
from nwor_bench.run import budget
from nwor_bench.run.budget import half_widths
from nwor_bench.run.run_options import RunOptions
from nwor_bench.run.sweep import resume_sweep, run_loaded
from nwor_bench.run.sweep_folder import SweepIndex
from nwor_bench.run.sweep_summary import sweep_result, swept_runs
from nwor_bench.workload.sweep_file import SweepFile

pytestmark = pytest.mark.slow  # loads a tokenizer


class Engine(FakeEngine):
    """Says how many windows a request had."""

    def generate(self, prompts: Any, *args: Any, **named: Any) -> BatchOutput:
        output = super().generate(prompts, *args, **named)
        return replace(output, request_acceptance=((7, 0, 0),) * len(prompts))


def swept(folder: Path, budget: str, engine: Engine) -> ExitCode:
    content = {
        "name": "worth",
        "axes": {"pairs": ["tiny"], "requests": [4, 2, 1], "draft_tokens": [4],
                 "nwor_modes": ["off"], "scv_modes": ["off"]},
        "settings": {"draft_counts": [0, 4], "batches": 1, "max_new_tokens": 8, "warmup": 0,
                     "max_warmup": 0, "max_blocks": 2, "time_budget": budget},
    }  # fmt: skip
    sweep = SweepFile.model_validate_json(json.dumps(content))
    options = RunOptions(output=folder, quiet=True)
    return run_loaded(sweep, options, **on(engine))


def on(engine: Engine) -> dict[str, Any]:
    return {"engine_factory": FakeFactory(engine), "check_engine": accept_arguments}


def status_of(folder: Path) -> dict[int, str]:
    runs = SweepIndex.open(folder).content["runs"]
    return {run["requests"]: run["status"] for run in runs}


@pytest.mark.parametrize(
    ("budget", "left_out"),
    [
        ("1000s", []),
        ("10s", [2]),  # a batch takes 0.1 s: 4 are the gate of a size, 45 its timed windows
        ("0.5s", [2, 4]),
    ],
)
def test_sizes_without_time_are_left_out_by_name(
    tmp_path: Path, budget: str, left_out: list[int]
) -> None:
    folder, engine = tmp_path / "worth", Engine()
    assert swept(folder, budget, engine) is ExitCode.OK
    status = dict.fromkeys((4, 2, 1), "done") | dict.fromkeys(left_out, LEFT_OUT)
    assert status_of(folder) == status
    gates = [call for call in engine.calls if call.cell.label == "k = 4"]
    assert {len(call.prompts) for call in gates} == {4, 2, 1} - set(left_out)
    index = SweepIndex.open(folder)
    runs = swept_runs(index)
    (worth,) = swept_worths(runs).values()
    assert list(worth.left_out) == left_out
    assert {rate.requests for rate in worth.worth.rates} == {4, 2, 1} - set(left_out)
    said = sweep_result(index, runs, swept_worths(runs))["answer"]
    assert said["badge"] == "NOT MEASURED"  # no batch of eight tokens has a group
    assert ("left out" in dict(worth_answer(worth).facts)) is bool(left_out)


def test_a_resumed_sweep_measures_what_was_left_out(tmp_path: Path) -> None:
    folder, engine = tmp_path / "worth", Engine()
    swept(folder, "10s", engine)
    code = resume_sweep(folder, options=RunOptions(quiet=True), **on(engine))
    assert code is ExitCode.OK
    assert set(status_of(folder).values()) == {"done"}


@pytest.mark.parametrize(("temperature", "blocks"), [(0.0, set()), (0.8, {1})])
def test_sampled_tokens_come_from_a_whole_batch_however_short_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, blocks: set[int]
) -> None:
    """The gate takes more than its third of the time, and is greedy."""
    clock = Clock(batch_s=0.1)
    monkeypatch.setattr(budget, "time", clock)
    run = Runner(
        tmp_path / "run", Engine(before=clock.before), interleave="windows", batches=1,
        draft_counts=[0, 4], nwor_modes="off", scv_modes="off", max_warmup=0, warmup=0,
        temperature=temperature, time_budget="1s",
    ).run()  # fmt: skip
    timed = of_phase(run, Phase.TIMED)
    assert {batch.block for batch in timed} == blocks
    assert {batch.temperature for batch in timed} <= {temperature}


def test_draft_counts_are_known_as_well_as_their_tokens_per_second() -> None:
    """Relative to the ratio, which is far from 1."""
    run = read_run(GOLDEN / "worth")
    found = analyse(run)
    assert found.worth is not None
    ratios = [rate.ratio for rate in found.worth.rates if rate.ratio is not None]
    widths = half_widths(run, 1_000)
    assert widths == [ratio.half_width / ratio.value for ratio in ratios]
    assert widths != [cell.half_width for cell in found.cells if cell.ratio is not None]
