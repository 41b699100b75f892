"""Two engines and an engine for each draft count: cells, configurations, order."""

import json
from typing import Any

import pytest
from refusals import refused

from nwor_bench.records.cell import ADAPTIVE, Arguments, Drafts, MethodCount, read_arm
from nwor_bench.records.types import AA, Interleave, NworMode, ScvMode
from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import make_plan
from nwor_bench.workload.sweep_file import SweepFile, group_by_engine, make_points

SCENARIO = Scenario(
    name="toy", requests=2, batches=6, warmup=1, draft_tokens=4, max_new_tokens=8, max_model_len=64
)


def spec_with(**given: Any) -> RunSpec:
    return resolve(SCENARIO, **given)


def test_the_cells_are_off_x_off_once_for_each_engine_and_the_a_a_arm() -> None:
    spec = spec_with(against='{"use_replayssm": true, "mamba_backend": "flashinfer"}')
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    arm = 'use_replayssm=true, mamba_backend="flashinfer"'
    assert labels == ["off x off", f"off x off ({arm})", "off x off (A/A)"]
    assert (spec.nwor_modes, spec.scv_modes) == ((NworMode.OFF,), (ScvMode.OFF,))
    assert spec.interleave is Interleave.BATCHES


def test_only_the_arms_engine_has_its_arguments() -> None:
    spec = spec_with(against='{"block_size": 32}', engine_args='{"block_size": 16, "seed_": 1}')
    arm = Arguments.of({"block_size": 32})
    assert spec.engine_specs[arm].engine_args == {"block_size": 32, "seed_": 1}
    for other in (None, AA):
        assert spec.engine_specs[other].engine_args == {"block_size": 16, "seed_": 1}
    assert {own.against for own in spec.engine_specs.values()} == {None}


def test_an_object_of_the_arms_engine_adds_to_the_baselines() -> None:
    """Otherwise the engines would differ in what nobody asked for: vLLM's choices of a kernel of
    gated delta nets are entries of additional_config."""
    given = {
        "additional_config": {"gdn_prefill_backend": "triton", "a": 1},
        "compilation_config": 3,
    }
    against = {"additional_config": {"a": 2, "b": 3}, "compilation_config": {"mode": 0}}
    spec = spec_with(against=json.dumps(against), engine_args=json.dumps(given))
    assert spec.engine_specs[Arguments.of(against)].engine_args == {
        "additional_config": {"gdn_prefill_backend": "triton", "a": 2, "b": 3},
        "compilation_config": {"mode": 0},
    }
    assert spec.engine_specs[None].engine_args == given


@pytest.mark.parametrize("given", [
    {"nwor_modes": "off,stage"}, {"scv_modes": "off,graph,adaptive"}, {"cells": "stage-off"},
])  # fmt: skip
def test_modes_that_were_written_are_no_part_of_a_comparison_of_engines(given: Any) -> None:
    """The default's too: it would be measured without them, and nothing would say so."""
    with refused("--against"):
        spec_with(against='{"block_size": 32}', **given)
    assert spec_with(against='{"block_size": 32}', nwor_modes="off", scv_modes="off").against


ONE_SLOT = '{"additional_config": {"nwor_state_slots": 1}}'

ONE_SLOT_ARM = 'additional_config={"nwor_state_slots": 1}'


@pytest.mark.parametrize(
    ("given", "scv"),
    [({}, "graph"), ({"scv_modes": "off"}, "off"), ({"scv_modes": "off,adaptive"}, "adaptive")],
)
def test_an_engine_with_one_state_slot_stages(given: dict[str, Any], scv: str) -> None:
    spec = spec_with(against=ONE_SLOT, **given)
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    assert labels == ["off x off", f"stage x {scv} ({ONE_SLOT_ARM})", "off x off (A/A)"]
    modes = [own.worker_variables.get("VLLM_NWOR_MODE") for own in spec.engine_specs.values()]
    assert modes == [None, "stage", None]


def test_every_engine_is_warmed_up_and_runs_once_a_block_in_changing_order() -> None:
    plan = make_plan(spec_with(against='{"block_size": 32}'), "toy", [Prompt("a", "chat", "x")])
    assert [cell.arm for cell in plan.warmed] == [Arguments("block_size=32"), AA, None]
    assert plan.num_batches == 3 * plan.max_warmup + 3 * (1 + 6)
    assert all(set(block.order) == set(plan.cells) for block in plan.blocks)
    assert len({block.order for block in plan.blocks}) > 1
    assert make_plan(spec_with(), "toy", [Prompt("a", "chat", "x")]).warmed[:-1] == ()


COUNTED = Scenario(
    name="toy", requests=2, batches=6, draft_tokens=2, max_new_tokens=8, max_model_len=64
)


def spec_by_count(**given: Any) -> RunSpec:
    flags = {"nwor_modes": "off", "scv_modes": "off", "draft_counts": [0, 1, 2], "engines": True}
    return resolve(COUNTED, **{**flags, **given})


def test_the_cells_are_the_counts_and_adaptive_verification_comes_last() -> None:
    spec = spec_by_count(adaptive_verification=True)
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    assert labels == ["k = 0", "k = 1", "k = 2", "k = adaptive", "off x off (A/A)"]
    assert tuple(spec.engine_specs) == (None, Drafts(1), Drafts(2), Drafts(ADAPTIVE), AA)
    assert spec.interleave is Interleave.BATCHES
    assert list(spec_by_count(engines=False).engine_specs) == [None]


def test_each_engine_drafts_its_count_and_that_of_0_none() -> None:
    rates = [0.8, 0.5]
    spec = spec_by_count(adaptive_verification=True, acceptance_rates=rates)
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


def test_every_counts_engine_runs_once_a_block() -> None:
    plan = make_plan(spec_by_count(), "toy", [Prompt("a", "chat", "x")])
    assert plan.engines_differ
    assert not plan.interleaved
    assert plan.baseline.label == "k = 0"
    assert all(set(block.order) == set(plan.cells) for block in plan.blocks)


ARMS = {
    "eagle": {"method": "eagle", "synthetic_acceptance_rates": [0.8, 0.5]},
    "lookup": {"method": "suffix", "engines": True, "num_speculative_tokens": [2]},
}


def test_a_method_has_one_engine_for_its_counts_or_one_for_each() -> None:
    spec = spec_by_count(arms=ARMS)
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    assert labels == [
        "k = 0", "eagle k=0", "eagle k=1", "eagle k=2", "lookup k=2", "off x off (A/A)",
    ]  # fmt: skip
    eagle, lookup = Arguments("eagle"), Drafts(MethodCount("lookup", 2))
    found = spec.engine_specs
    assert tuple(found) == (None, eagle, lookup, AA)
    assert {arm: own.scenario.draft_tokens for arm, own in found.items()} == {
        None: 0, eagle: 2, lookup: 2, AA: 0,
    }  # fmt: skip
    assert found[eagle].experiment.counts == (0, 1, 2)
    assert found[eagle].scenario.requests == 3  # vLLM names a count for each batch size
    assert found[eagle].speculative_config == {"synthetic_acceptance_rates": [0.8, 0.5]}
    for arm in (None, lookup, AA):
        assert (found[arm].experiment.counts, found[arm].scenario.requests) == ((), 2)
    assert found[lookup].speculative_config is None
    assert {own.arms for own in found.values()} == {None}


def test_rates_of_an_engine_for_one_count_are_those_of_its_drafts() -> None:
    arms = {"eagle": {**ARMS["eagle"], "engines": True}}
    found = spec_by_count(arms=arms).engine_specs
    rates = {arm: (own.speculative_config or {}) for arm, own in found.items()}
    assert rates[Drafts(MethodCount("eagle", 1))] == {"synthetic_acceptance_rates": [0.8]}


@pytest.mark.parametrize("number", [0, 3, [1, 3], "2", [0], True])
def test_an_arm_has_no_more_drafts_than_the_run(number: Any) -> None:
    with refused("--arm: eagle: num_speculative_tokens"):
        spec_by_count(arms={"eagle": {"method": "eagle", "num_speculative_tokens": number}})


def test_arms_need_engines_and_no_adaptive_verification() -> None:
    with refused("arms", naming="engines = true"):
        spec_by_count(arms=ARMS, engines=False)
    with refused("--adaptive-verification"):
        spec_by_count(arms=ARMS, adaptive_verification=True)


def test_a_group_has_the_engines_that_it_names_and_plain_decoding() -> None:
    spec = spec_by_count(arms=ARMS, engines_at_once="lookup")
    labels = [cell.label for cell in spec.experiment.cells("toy")]
    assert labels == ["k = 0", "lookup k=2", "off x off (A/A)"]
    assert tuple(spec.engine_specs) == (None, Drafts(MethodCount("lookup", 2)), AA)
    with refused("engines_at_once", value="looku", near="lookup"):
        spec_by_count(arms=ARMS, engines_at_once="eagle+looku")


def test_groups_share_the_time_by_their_cells() -> None:
    """Five cells in the first and three in the second."""
    axes = {"pairs": ["tiny"], "engines_at_once": ["eagle", "lookup"], "requests": [2],
            "draft_tokens": [2], "nwor_modes": ["off"], "scv_modes": ["off"]}  # fmt: skip
    settings = {"draft_counts": [0, 1, 2], "engines": True, "arms": ARMS, "time_budget": "80s"}
    content = json.dumps({"name": "worth", "axes": axes, "settings": settings})
    points = make_points(SweepFile.model_validate_json(content))
    assert [(p.words["engines_at_once"], p.spec.time_budget_s) for p in points] == [
        ("eagle", 50), ("lookup", 30),
    ]  # fmt: skip
    assert [p.folder for p in points] == [
        "01-tiny-short-k2-r2-t0-eagle",
        "02-tiny-short-k2-r2-t0-lookup",
    ]
    assert len(group_by_engine(points)) == 2


def test_an_arm_is_read_as_it_was_written() -> None:
    arms = (
        None, AA, Drafts(0), Drafts(ADAPTIVE), Drafts(MethodCount("my.arm-1", 12)),
        Arguments.of({"a": "x k=2"}), Arguments.of({"a": 1, "b": 2}),
    )  # fmt: skip
    for arm in arms:
        assert read_arm(None if arm is None else str(arm)) == arm


def test_the_second_engine_may_draft_otherwise() -> None:
    against = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "x": 1}}
    spec = spec_with(against=json.dumps(against), speculative_config='{"x": 0, "y": 3}')
    arm = Arguments.of(against)
    second = spec.engine_specs[arm]
    assert second.speculative_config == {"x": 1, "y": 3}  # the method is that of its models
    assert (second.scenario.draft_tokens, second.engine_args) == (2, {})
    assert spec.drafting_arms == {str(arm): against["speculative_config"]}
    for other in (None, AA):
        own = spec.engine_specs[other]
        assert (own.speculative_config, own.scenario.draft_tokens) == ({"x": 0, "y": 3}, 4)
    assert spec_with(against='{"speculative_config": {"x": 1}}').drafting_arms == {}


def test_the_second_engine_may_have_variables_of_its_own() -> None:
    spec = spec_with(against='{"VLLM_USE_V2_MODEL_RUNNER": false, "block_size": 32}')
    variables = [own.worker_variables for own in spec.engine_specs.values()]
    assert [own.get("VLLM_USE_V2_MODEL_RUNNER") for own in variables] == [None, "0", None]


@pytest.mark.parametrize("number", [129, -1, "4"])
def test_the_second_engine_has_as_many_drafts_as_vllm_verifies(number: Any) -> None:
    with refused("--against: num_speculative_tokens", value=number, naming="128"):
        spec_with(against=json.dumps({"speculative_config": {"num_speculative_tokens": number}}))


@pytest.mark.parametrize("config", ["3", "[]", '"ngram"'])
def test_a_speculative_config_is_an_object(config: str) -> None:
    with refused("--against: speculative_config"):
        spec_with(against=f'{{"speculative_config": {config}}}')
