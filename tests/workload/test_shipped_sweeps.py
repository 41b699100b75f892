"""The sweep files of the repository can meet their own rules: steady warm-up, enough blocks."""

import pytest

from nwor_bench.analysis.findings.run import FEW_BLOCKS
from nwor_bench.run.budget import WARMUP_SHARE
from nwor_bench.workload.resources import resource_dir
from nwor_bench.workload.run_spec import WARMUP_LOOKBACK, RunSpec
from nwor_bench.workload.stopping import FIRST_LOOK
from nwor_bench.workload.sweep_file import load_sweep
from nwor_bench.workload.sweep_points import make_points

FILES = sorted(path.stem for path in resource_dir("sweeps").glob("*.toml"))

PUBLISHED = ("first-run-3b", "first-run-smollm2")
"""They repeat a published run, which had two blocks."""

BATCH_S = 4.6
"""A batch of eight requests on two cores without native bf16, in float32."""

CELLS = 7


def specs(name: str) -> list[RunSpec]:
    return [
        point.spec for point in make_points(load_sweep(resource_dir("sweeps") / f"{name}.toml"))
    ]


@pytest.mark.parametrize("name", FILES)
def test_warm_up_may_last_until_it_is_steady(name: str) -> None:
    for spec in specs(name):
        _, most = spec.warmup_batches
        assert most >= WARMUP_LOOKBACK
        if spec.time_budget_s is not None:
            assert spec.time_budget_s * WARMUP_SHARE >= WARMUP_LOOKBACK * BATCH_S


@pytest.mark.parametrize("name", [name for name in FILES if name not in PUBLISHED])
def test_there_are_blocks_enough_for_an_answer(name: str) -> None:
    for spec in specs(name):
        assert spec.stopping.max_blocks >= FEW_BLOCKS
        if spec.ci_width is not None:
            assert spec.stopping.looks
            assert spec.stopping.looks[0] == max(FIRST_LOOK, spec.scenario.batches)
        if spec.time_budget_s is not None:
            batches = CELLS * (1 + FIRST_LOOK) + WARMUP_LOOKBACK
            assert spec.time_budget_s >= batches * BATCH_S
