"""vLLM's features beside speculation on a GPU: priorities, embeddings, new weights, offload."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import PROMPTS
from checklist_tools import check_partial, compare, greedy
from engine_tools import FULL_FOR_ALL, SCV, tiny_pair, tiny_spec
from feature_rows import (
    check_beam_search,
    check_priorities,
    check_prompt_embeds,
    check_reload,
    feature_arguments,
)

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

Start = Callable[..., VllmEngine]


def test_features_under_full_graphs(tmp_path: Path, start_alone: Start) -> None:
    """The weights change last: both sets of graphs read them at the addresses of their capture."""
    pair = tiny_pair(tmp_path, "ngram")
    arguments = feature_arguments(**FULL_FOR_ALL)
    engine = start_alone(pair, tiny_spec(block_size=32, engine_args=arguments))
    for scv in SCV:
        check_priorities(engine, scv)
    check_prompt_embeds(engine, SCV)
    check_beam_search(engine)
    check_reload(engine, pair.target, tmp_path, exact=False)


def test_weights_offloaded_to_the_host(tmp_path: Path, start_alone: Start) -> None:
    arguments = {**FULL_FOR_ALL, "cpu_offload_gb": 0.001}
    spec = tiny_spec(block_size=32, engine_args=json.dumps(arguments))
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), spec)
    stock, _ = compare(engine, PROMPTS, greedy(), SCV)
    check_partial(stock)
