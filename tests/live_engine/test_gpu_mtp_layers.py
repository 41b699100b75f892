"""Real vLLM on a GPU where a model's own layer drafts (MTP), as most recipes have it: staged.

The drafter's layer lies in the target's cache groups and is attended alike, and stays stock's.
Random weights and synthetic acceptance; sparse latent attention is in `test_gpu_sparse_mla.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_tools import GRAPHS, mtp_of, pair_with, tiny_spec
from test_gpu_groups import DUMMY, check_all
from test_gpu_mla import V3
from tiny_hybrids import OWN_ARGUMENTS, hybrid_pair

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import ResolvedPair

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.row("mtp")]

LAYER = {"num_nextn_predict_layers": 1}


def build(family: str, folder: Path) -> ResolvedPair:
    """A small model of the family, drafted for by its own layer."""
    if family == "DeepSeek-V3":
        return mtp_of(pair_with("mla-shape", {**V3, **LAYER}, folder))
    return mtp_of(hybrid_pair(folder / "model", family, "bfloat16"))


@pytest.mark.parametrize(
    ("family", "graphs", "target_layers"),
    [
        ("DeepSeek-V3", "full", 4),
        ("DeepSeek-V3", "eager", 4),
        ("GLM-4.5", "full", 4),
        ("GLM-4.5", "eager", 4),
        ("Qwen3-Next", "full", 1),
        ("Qwen3-Next", "eager", 1),
    ],
)
def test_a_model_that_drafts_for_itself_is_staged(
    family: str,
    graphs: str,
    target_layers: int,
    tmp_path: Path,
    start_alone: Callable[..., VllmEngine],
    record_property: Callable[[str, object], None],
) -> None:
    arguments = {**DUMMY, **GRAPHS[graphs], **OWN_ARGUMENTS.get(family, {})}
    spec = tiny_spec(draft_tokens=4, kv_cache_gib=0.5, engine_args=json.dumps(arguments))
    engine = start_alone(build(family, tmp_path), spec)
    assert engine.status().target_layers == target_layers, engine.status()  # without the drafter's
    check_all(engine, "bfloat16", graphs, record_property)
