"""An EAGLE head registers as one more layer of the target, and must not be staged."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import check_drafter
from engine_tools import eagle_pair, run_cell, smollm2_on_short, tiny_spec, total

from nwor_bench.engine.engine import VllmEngine

pytestmark = pytest.mark.engine


@pytest.mark.row("eagle")
def test_the_head_is_told_from_the_targets_layers(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    engine = start_engine(eagle_pair(tmp_path), tiny_spec(block_size=32))
    assert engine.status().staging_buffers == 3
    check_drafter(engine, ["graph"])


@pytest.mark.long
@pytest.mark.row("eagle")
def test_the_shipped_head_drafts_held_out_prompts(start_engine: Callable[..., VllmEngine]) -> None:
    """Real weights in float32, so that tokens can be compared."""
    pair, prompts = smollm2_on_short("smollm2", 6)
    spec = tiny_spec(requests=6, draft_tokens=4, dtype="float32", max_new_tokens=32)
    engine = start_engine(pair, spec)
    stock = run_cell(engine, "off", "off", prompts, max_new_tokens=32)
    staged = run_cell(engine, "stage", "graph", prompts, max_new_tokens=32)
    assert staged.token_ids == stock.token_ids
    assert staged.counters == stock.counters
    assert total(staged, "staged_tokens") == total(staged, "draft_tokens") > 0
    # As much as we want of it; prompt lookup gains 1.5 there, an untrained head 1.0.
    assert 1 + stock.counters.accepted_tokens / stock.counters.num_drafts >= 2.0
