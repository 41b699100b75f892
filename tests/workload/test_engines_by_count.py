"""An engine for each draft count: cells, configurations, and what is refused."""

from typing import Any

from nwor_bench.records.cell import ADAPTIVE, Drafts
from nwor_bench.records.types import AA, Interleave
from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import make_plan

SCENARIO = Scenario(
    name="toy", requests=2, batches=6, draft_tokens=2, max_new_tokens=8, max_model_len=64
)


def spec_with(**given: Any) -> RunSpec:
    flags = {"nwor_modes": "off", "scv_modes": "off", "draft_counts": [0, 1, 2], "engines": True}
    return resolve(SCENARIO, **{**flags, **given})


def test_the_cells_are_the_counts_and_adaptive_verification_comes_last() -> None:
    spec = spec_with(adaptive_verification=True)
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    assert labels == ["k = 0", "k = 1", "k = 2", "k = adaptive", "off x off (A/A)"]
    assert tuple(spec.engine_specs) == (None, Drafts(1), Drafts(2), Drafts(ADAPTIVE), AA)
    assert spec.interleave is Interleave.BATCHES
    assert list(spec_with(engines=False).engine_specs) == [None]


def test_each_engine_drafts_its_count_and_that_of_0_none() -> None:
    rates = [0.8, 0.5]
    spec = spec_with(adaptive_verification=True, acceptance_rates=rates)
    named = "synthetic_acceptance_rates"
    found = spec.engine_specs
    drafts = {arm: own.scenario.draft_tokens for arm, own in found.items()}
    assert drafts == {None: 0, Drafts(1): 1, Drafts(2): 2, Drafts(ADAPTIVE): 2, AA: 0}
    assert {own.draft_counts for own in found.values()} == {None}
    assert all(list(own.engine_specs) == [None] for own in found.values())
    assert found[Drafts(1)].speculative_config == {named: [0.8]}
    assert found[Drafts(2)].speculative_config == {named: rates}
    adaptive = {named: rates, "enable_adaptive_verification": True}
    assert found[Drafts(ADAPTIVE)].speculative_config == adaptive
    attention = {own.worker_variables["VLLM_NWOR_CPU_ATTENTION"] for own in found.values()}
    assert attention == {"stock"}


def test_every_engine_runs_once_a_block() -> None:
    plan = make_plan(spec_with(), "toy", [Prompt("a", "chat", "x")])
    assert plan.engines_differ
    assert not plan.interleaved
    assert plan.baseline.label == "k = 0"
    assert all(set(block.order) == set(plan.cells) for block in plan.blocks)
