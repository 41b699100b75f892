"""A closed engine gives its memory back: the next one of the process needs it."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import close, prompts_of, run_cell, tiny_pair, tiny_spec

from nwor_bench.engine.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.own_process]  # the process's first engine


def test_nothing_holds_the_first_engine_of_a_process(
    start_alone: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    """vLLM keeps the error of an import that failed, and so the frames in which it began."""
    engine = start_alone(tiny_pair(tmp_path, "draft_model"), tiny_spec(block_size=32))
    run_cell(engine, "stage", "off", prompts_of([40, 50]))
    llm = weakref.ref(engine._llm)
    close(engine)
    gc.collect()
    assert llm() is None
