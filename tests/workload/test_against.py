"""`--against`: cells, the engines' configurations, and what is refused."""

from typing import Any

import pytest

from nwor_bench.records.cell import Arguments
from nwor_bench.records.types import AA, Interleave, NworMode, ScvMode
from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import make_plan

SCENARIO = Scenario(
    name="toy", requests=2, batches=6, warmup=1, draft_tokens=4, max_new_tokens=8, max_model_len=64
)
FLAGS = {"nwor_modes": "off,stage", "scv_modes": "off,graph,adaptive"}
"""What the command line gives if nothing is written."""


def spec_with(**given: Any) -> RunSpec:
    return resolve(SCENARIO, **{**FLAGS, **given})


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
