"""A pair's shape without weights on a GPU, in bf16: its engine, and what the K/V gate finds."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_tools import OUR_ATTENTION, SCV, tiny_spec
from kv_gate_tools import kv_results

from nwor_bench.analysis.parity.kv import KvVerdict
from nwor_bench.engine.engine import VllmEngine
from nwor_bench.engine.protocol import BatchOutput
from nwor_bench.models.pairs import resolve_pair

NEW_TOKENS = 60
"""Tokens that each request gets."""


@contextmanager
def shape_engine(name: str, arguments: dict[str, Any], folder: Path) -> Iterator[VllmEngine]:
    """Engine of pair `name` with vLLM's `arguments`; vLLM cannot hold two at a time."""
    pair = resolve_pair(name, cache_dir=folder)
    spec = tiny_spec(
        draft_tokens=4,
        max_model_len=1024,
        max_new_tokens=NEW_TOKENS,
        engine_args=json.dumps(arguments),
        attention="merge" if name.startswith(("deepseek", "mla")) else OUR_ATTENTION,
    )
    engine = VllmEngine(pair, spec, None)
    yield engine
    engine.close()


def check_kv_gate(
    engine: VllmEngine,
    prompts: list[list[int]],
    record_property: Callable[[str, object], None],
    *,
    name: str = "",
    before_check: Callable[[BatchOutput], None] = lambda output: None,
) -> None:
    """In every SCV mode mode stage leaves each row within the error of mode off itself.

    Args:
        name: stands before the SCV mode in what is recorded.
        before_check: as for `kv_results`.
    """
    results = kv_results(
        engine, prompts, scv_modes=SCV, max_new_tokens=NEW_TOKENS, before_check=before_check
    )
    in_cache = sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS - 1)  # all but the last tokens
    for scv, result in zip(SCV, results, strict=True):
        found = result.to_dict()
        record_property(f"{name} {scv}".strip(), found)
        assert (result.reason, result.verdict) == (None, KvVerdict.WITHIN), (scv, found)
        assert result.checked == result.committed == in_cache, (scv, in_cache, found)
