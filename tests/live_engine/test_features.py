"""Priorities, prompt embeddings, beam search and new weights on one CPU engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import tiny_pair, tiny_spec
from feature_rows import (
    check_beam_search,
    check_priorities,
    check_prompt_embeds,
    check_reload,
    feature_arguments,
)

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ResolvedPair:
    """Prompt lookup: vLLM's V1 runner drafts for no embedded prompt with a draft model."""
    return tiny_pair(tmp_path_factory.mktemp("pair"), "ngram")


@pytest.fixture(scope="module")
def engine(start_engine: Callable[..., VllmEngine], pair: ResolvedPair) -> VllmEngine:
    """One engine with every feature that these tests ask for."""
    return start_engine(pair, tiny_spec(block_size=32, engine_args=feature_arguments()))


@pytest.mark.parametrize("scv", ["off", "graph"])
def test_an_urgent_request_displaces_others(engine: VllmEngine, scv: str) -> None:
    check_priorities(engine, scv)


def test_prompts_given_as_embeddings(engine: VllmEngine) -> None:
    check_prompt_embeds(engine, ["off", "graph"])


def test_beam_search(engine: VllmEngine) -> None:
    check_beam_search(engine)


def test_weights_that_are_loaded_again(
    engine: VllmEngine, pair: ResolvedPair, tmp_path: Path
) -> None:
    check_reload(engine, pair.target, tmp_path)
