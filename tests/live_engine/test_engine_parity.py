"""`stage` says exactly what `off` says, in float32, on real vLLM."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from checklist_rows import SHARED, check_shared_prefixes
from checklist_tools import compare, greedy
from engine_tools import (
    INTERLEAVED_CELLS,
    prompts_of,
    run_cell,
    run_interleaved,
    tiny_pair,
    tiny_spec,
    total,
    total_of,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.records.types import Cell, NworMode, ScvMode

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Setting:
    """One engine: its row, how it drafts, its block size, and the acceptance it must show.

    `long`: only in `make test-all`.
    """

    row: str
    name: str
    method: str
    noise: float
    block_size: int
    acceptance: tuple[float, float]
    long: bool = False


SETTINGS = [
    Setting("ngram", "ngram", "ngram", 0.0, 32, (0.05, 0.95), long=True),
    Setting("partial acceptance", "partial acceptance", "draft_model", 0.05, 64, (0.2, 0.95)),
    Setting("full acceptance", "full acceptance", "draft_model", 0.0, 32, (0.99, 1.0), long=True),
    Setting("no acceptance", "full rejection", "draft_model", 50.0, 64, (0.0, 0.05), long=True),
]

STEADY = prompts_of([24, 31, 18, 40, 27, 22, 35, 29])
MIXED = prompts_of([300, 20, 150, 25, 260, 33, 18, 90])
BATCHES = {
    "one request": STEADY[:1],
    "several requests": STEADY,
    "prefill beside decode": MIXED,
    "shared prefix": SHARED,
}
IN_MAKE_TEST = "prefill beside decode"
"""The hardest batch: of the others `make test` has only mode stage."""

BY_NAME = [
    pytest.param(name, marks=[pytest.mark.long] * (name != IN_MAKE_TEST)) for name in BATCHES
]
ROW_OF_BATCH = {**{name: name for name in BATCHES}, "shared prefix": "shared prefixes"}


def with_rows(setting: Setting) -> Any:
    """The setting as a parameter that stands for its rows of the checklist."""
    rows = dict.fromkeys((setting.row, setting.method))
    marks = [pytest.mark.row(row) for row in rows] + [pytest.mark.long] * setting.long
    return pytest.param(setting, marks=marks, id=setting.name)


@pytest.fixture(scope="module", params=[with_rows(setting) for setting in SETTINGS])
def setting(request: pytest.FixtureRequest) -> Setting:
    """Each setting in turn."""
    return request.param


@pytest.fixture(scope="module")
def engine(
    setting: Setting,
    start_engine: Callable[..., VllmEngine],
    tmp_path_factory: pytest.TempPathFactory,
) -> VllmEngine:
    """64 tokens a step at most: long prompts are prefilled in chunks beside decoding requests."""
    pair = tiny_pair(tmp_path_factory.mktemp("pair"), setting.method, setting.noise)
    chunked = '{"max_num_batched_tokens": 64, "enable_prefix_caching": true}'
    return start_engine(pair, tiny_spec(block_size=setting.block_size, engine_args=chunked))


@pytest.mark.row("Llama")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.row(row)) for name, row in ROW_OF_BATCH.items()]
)
@pytest.mark.parametrize(
    "scv_modes", [("off", "graph"), pytest.param(("adaptive",), marks=pytest.mark.long)]
)
def test_stage_gives_the_tokens_of_off(
    engine: VllmEngine, name: str, scv_modes: tuple[str, ...]
) -> None:
    compare(engine, BATCHES[name], greedy(), scv_modes)


@pytest.mark.parametrize("name", BY_NAME)
def test_interleaved_cells_give_the_tokens_of_off(engine: VllmEngine, name: str) -> None:
    """One sequence, whose windows are written and committed by the cell that runs then."""
    reference = run_cell(engine, "off", "off", BATCHES[name])
    output, windows, _ = run_interleaved(engine, BATCHES[name])
    assert output.token_ids == reference.token_ids
    assert output.counters == reference.counters
    assert total(output, "accepted_tokens") == output.counters.accepted_tokens
    for cell, own in windows.items():
        staged, drafts = total_of(own, "staged_tokens"), total_of(own, "draft_tokens")
        assert staged == (drafts if cell.nwor_mode is NworMode.STAGE else 0), cell.label
        control = drafts if cell.nwor_mode is NworMode.CONTROL else 0
        assert total_of(own, "control_tokens") == control, cell.label
        settled = total_of(own, "committed_tokens") + total_of(own, "rejected_tokens")
        assert settled == staged
    assert {window.fallback_reason for window in output.windows} == {None}


def test_every_cell_has_its_turns_and_its_own_counters(engine: VllmEngine) -> None:
    """A batch has 10 to 40 windows, which is a group or two."""
    seen: set[Cell] = set()
    for seed in "abcdefghijklmnopqrstuvwx":
        output, windows, facts = run_interleaved(engine, STEADY, seed=seed)
        for cell, own in windows.items():
            validations = facts[cell]["scv_counters"].get("scv_fallback_count", 0)
            assert validations == (0 if cell.scv_mode is ScvMode.OFF else len(own)), cell.label
            seen |= {cell} if own else set()
        turns = [window for window in output.windows if window.group is not None]
        assert [turn.position for turn in turns][:2] == [0, 1]
        if seen == set(INTERLEAVED_CELLS):
            break
    assert seen == set(INTERLEAVED_CELLS)
    assert run_cell(engine, "off", "off", STEADY).windows[0].group is None


@pytest.mark.row("temperature and top-p")
def test_sampling_keeps_the_counts(engine: VllmEngine) -> None:
    """Tokens cannot be compared: vLLM's CPU rejection sampler is not reproducible from a seed."""
    output = run_cell(engine, "stage", "graph", STEADY, temperature=0.8)
    assert output.token_ids != run_cell(engine, "off", "off", STEADY).token_ids
    assert total(output, "staged_tokens") == output.counters.draft_tokens > 0
    assert total(output, "committed_tokens") == output.counters.accepted_tokens


@pytest.mark.row("shared prefixes")
def test_prefix_cache_hits_read_committed_tokens(engine: VllmEngine) -> None:
    check_shared_prefixes(engine, ["off"])


def test_modes_switch_in_one_engine_and_only_target_layers_are_staged(
    engine: VllmEngine, setting: Setting
) -> None:
    status = engine.status()
    assert status.target_layers == status.staging_buffers == 3
    assert status.drafter_layers == (0 if setting.method == "ngram" else 3)
    output = run_cell(engine, "stage", "off", STEADY)
    assert total(output, "stage_operations") == 3 * total(output, "staged_tokens")
    low, high = setting.acceptance
    assert low <= output.counters.accepted_tokens / output.counters.draft_tokens <= high
    off = run_cell(engine, "off", "off", STEADY)
    assert total(off, "staged_tokens") == 0
    assert off.windows[0].mask_ms is None
    assert off.windows[0].commit_ms is None
