"""Speculative settings on a CPU engine that no other file has.

What vLLM's CPU build cannot run is in `test_gpu_methods.py`, or refused by name: ngram_gpu pins
memory, suffix decoding needs a package that is not installed, DSpark and block verification are
the V2 runner's.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import ONE_LONG
from checklist_tools import check_cache, check_partial, compare, greedy
from engine_tools import tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.long]

SCHEDULE = {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 8, 2]]}
"""Two drafts from four requests on, four below."""


def test_drafts_whose_number_follows_the_batch(
    tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    spec = tiny_spec(draft_tokens=4, block_size=32, speculative_config=json.dumps(SCHEDULE))
    engine = start_engine(tiny_pair(tmp_path, "draft_model"), spec)
    lengths = [greedy(10 + 8 * number) for number in range(len(ONE_LONG))]
    stock, staged = compare(engine, ONE_LONG, lengths, ("off", "graph"))
    check_partial(stock)
    drafts = {len(window["drafts_per_position"]) for window in staged.windows}
    assert {2, 4} <= drafts
    check_cache(engine, ONE_LONG, staged)
