"""The checklist's draft methods that test_engine_parity.py does not have, and LoRA."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checklist_rows import check_adapter, check_drafter
from engine_tools import tiny_pair, tiny_spec
from support_tools import check_support
from tiny_drafters import eagle3_pair, mtp_pair, speculators_pair

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.long]


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(eagle3_pair, marks=pytest.mark.row("eagle3"), id="eagle3"),
        pytest.param(speculators_pair, marks=pytest.mark.row("eagle3"), id="speculators"),
        pytest.param(mtp_pair, marks=pytest.mark.row("mtp"), id="mtp"),
    ],
)
def test_a_drafter_in_the_targets_cache_group(
    build: Callable[[Path], ResolvedPair], tmp_path: Path, start_engine: Callable[..., VllmEngine]
) -> None:
    pair, spec = build(tmp_path), tiny_spec(block_size=32)
    engine = start_engine(pair, spec)
    check_support(Path(pair.target), engine.status(), spec, pair.method)
    check_drafter(engine, ["off", "graph"])


@pytest.mark.row("LoRA")
def test_an_adapter(tmp_path: Path, start_engine: Callable[..., VllmEngine]) -> None:
    """In a batch with both, stock vLLM 0.32 gives every request the adapter on a CPU."""
    pair = tiny_pair(tmp_path / "pair", "ngram")
    arguments = json.dumps({"enable_lora": True, "max_lora_rank": 8})
    engine = start_engine(pair, tiny_spec(block_size=32, engine_args=arguments))
    check_adapter(engine, pair.target, tmp_path / "lora", ["off", "graph"], fallback=None)
