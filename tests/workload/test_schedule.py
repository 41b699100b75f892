"""The plan: complete blocks in a random order, all of it from the seed."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.workload.config import RunSpec, Scenario, resolve
from nwor_bench.workload.prompts import Prompt
from nwor_bench.workload.schedule import GATE_BLOCK, make_plan, select_blocks

SCENARIO = Scenario(
    name="toy", requests=2, batches=3, draft_tokens=4, max_new_tokens=8, max_model_len=64
)
POOL = [Prompt(f"{c}-{i}", c, "text") for c in ("chat", "code") for i in range(7)]

modes = st.permutations(["off", "graph", "adaptive"]).flatmap(
    lambda order: st.integers(1, 3).map(
        lambda n: ",".join(order[:n] if "off" in order[:n] else [*order[: n - 1], "off"])
    )
)


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    overrides = {
        "requests": draw(st.integers(1, 20)),
        "batches": draw(st.integers(1, 12)),
        "warmup": draw(st.integers(0, 3)),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    nwor = draw(st.sampled_from(["off", "off,stage", "stage,off"]))
    return resolve(SCENARIO, **overrides, nwor_modes=nwor, scv_modes=draw(modes))


def spec_with(**overrides: int) -> RunSpec:
    return resolve(SCENARIO, **overrides)


@given(specs())
def test_every_cell_runs_once_in_every_block(spec: RunSpec) -> None:
    plan = make_plan(spec, "toy", POOL)
    assert [block.number for block in plan.blocks] == list(range(1, spec.scenario.batches + 1))
    assert plan.gate.number == GATE_BLOCK
    assert plan.cells == spec.experiment.cells("toy")
    assert plan.gate.order[0] == plan.baseline
    assert plan.baseline.label == "off x off"
    for block in (plan.gate, *plan.blocks):
        assert Counter(block.order) == Counter(plan.cells)
        assert len(block.prompts) == spec.scenario.requests
    assert plan.warmup == spec.scenario.warmup <= plan.max_warmup
    batches = plan.max_warmup + sum(len(block.order) for block in (plan.gate, *plan.blocks))
    assert plan.num_batches == batches + spec.stages  # the gate's last batch


@given(specs())
def test_the_same_seed_gives_the_same_plan(spec: RunSpec) -> None:
    assert make_plan(spec, "toy", POOL) == make_plan(spec, "toy", list(POOL))


@given(specs())
def test_the_prompts_of_a_block_depend_on_nothing_but_seed_and_number(spec: RunSpec) -> None:
    plan = make_plan(spec, "toy", POOL)
    for block in (plan.gate, *plan.blocks):
        alone = select_blocks(POOL, spec.scenario.requests, block.number + 1, spec.seed)
        assert list(block.prompts) == alone[block.number]


def test_more_blocks_keep_the_first_ones() -> None:
    short, long = (make_plan(spec_with(batches=n), "toy", POOL) for n in (3, 9))
    assert long.gate == short.gate
    assert long.blocks[:3] == short.blocks


def test_the_order_is_random_over_blocks() -> None:
    blocks = make_plan(spec_with(batches=120), "toy", POOL).blocks
    first = Counter(block.order[0] for block in blocks)
    # 120 draws of 7: a fair die shows every face 4 to 36 times with p > 1 - 1e-4.
    assert len(first) == 7
    assert all(4 <= times <= 36 for times in first.values())
    assert len({block.order for block in blocks}) > 60
