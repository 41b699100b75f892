"""The sweep files of the repository can meet their own rules: steady warm-up, enough blocks."""

import pytest

from nwor_bench.analysis.findings.sample import ENOUGH_BLOCKS
from nwor_bench.records.types import Interleave
from nwor_bench.run.budget import WARMUP_SHARE
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK, RunSpec
from nwor_bench.workload.schedule import CHECK_BLOCKS
from nwor_bench.workload.stopping import FIRST_LOOK
from nwor_bench.workload.sweep_file import load_sweep, make_points
from nwor_bench.workload.toml_file import resource_dir

FILES = sorted(path.stem for path in resource_dir("sweeps").glob("*.toml"))

PUBLISHED = ("first-run-3b", "first-run-smollm2")
"""They repeat a published run, which had two blocks."""

CPU_BATCH_S = 4.6
"""A batch of eight requests on two cores without native bf16, in float32."""

GPU_TOKEN_S = 0.43 / 96
"""A batch of eight requests on an H200, for each output token of one (results/h200/runs.csv.gz)."""


def specs(name: str) -> list[RunSpec]:
    return [
        point.spec for point in make_points(load_sweep(resource_dir("sweeps") / f"{name}.toml"))
    ]


def batch_s(name: str, spec: RunSpec) -> float:
    return GPU_TOKEN_S * spec.scenario.max_new_tokens if name.startswith("h200") else CPU_BATCH_S


@pytest.mark.parametrize("name", FILES)
def test_warm_up_may_last_until_it_is_steady(name: str) -> None:
    for spec in specs(name):
        _, most = spec.warmup_batches
        assert most >= WARMUP_LOOKBACK
        if spec.time_budget_s is not None:
            assert spec.time_budget_s * WARMUP_SHARE >= WARMUP_LOOKBACK * batch_s(name, spec)


@pytest.mark.parametrize("name", [name for name in FILES if name not in PUBLISHED])
def test_there_are_blocks_enough_for_an_answer(name: str) -> None:
    for spec in specs(name):
        assert spec.stopping.max_blocks >= ENOUGH_BLOCKS
        if spec.ci_width is not None:
            assert spec.stopping.looks
            assert spec.stopping.looks[0] == max(FIRST_LOOK, spec.scenario.batches)
        if spec.time_budget_s is not None:
            # If cells are interleaved, a few whole batches check them and one batch is a block.
            interleaved = spec.interleave is Interleave.WINDOWS
            whole = len(CHECK_BLOCKS) if interleaved else FIRST_LOOK
            batches = (
                len(spec.experiment.cells("pair")) * (1 + whole) + WARMUP_LOOKBACK + interleaved
            )
            assert spec.time_budget_s >= batches * batch_s(name, spec)
