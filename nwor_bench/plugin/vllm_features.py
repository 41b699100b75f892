"""Differences between vLLM 0.31, 0.32 and 0.33, each found on vLLM's objects and only here.

No code asks for vLLM's version number. Other differences need no code: 0.33 has no Medusa in its
V1 runner, and it puts the null block in place of blocks below a sliding window, to which our
attention gives no weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def acceptable_drafts(grammar_output: Any) -> Sequence[int] | None:
    """How many drafts of each request of a GrammarOutput may be accepted; None: vLLM 0.31.

    A grammar output without numbers means in vLLM that no draft may be accepted.
    """
    if not hasattr(grammar_output, "num_acceptable_drafts"):
        return None
    requests = len(grammar_output.structured_output_request_ids)
    return grammar_output.num_acceptable_drafts or [0] * requests


def invalid_drafts_in_scheduler(scheduler_output: Any) -> Mapping[str, int]:
    """Forbidden drafts by request, as the scheduler notes them in its own SchedulerOutput.

    vLLM 0.31 has them nowhere else, and a worker in another process has a copy without them: its
    forbidden drafts count as drafts there.
    """
    return scheduler_output.num_invalid_spec_tokens or {}


def bypasses_kv_cache_update(layer: Any) -> bool:
    """True if a fused kernel writes a layer's K/V before attention is called (from vLLM 0.33)."""
    return any(getattr(part, "kv_cache_update_bypass", False) for part in (layer, layer.impl))
