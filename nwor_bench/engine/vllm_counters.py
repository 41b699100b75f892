"""vLLM's own spec_decode counters, which our records must agree with."""

from dataclasses import dataclass
from typing import Any

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class VllmCounters:
    """vLLM's own spec_decode counters (a difference over one batch)."""

    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def minus(self, before: "VllmCounters") -> "VllmCounters":
        """Counts since `before`."""
        earlier = before.accepted_per_position or (0,) * len(self.accepted_per_position)
        return VllmCounters(
            self.num_drafts - before.num_drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(
                now - then for now, then in zip(self.accepted_per_position, earlier, strict=True)
            ),
        )


def read_counters(llm: Any) -> VllmCounters:
    """Counts since `llm` (a vllm.LLM) started."""
    found: dict[str, int] = {}
    per_position: tuple[int, ...] = ()
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            found[_COUNTERS[metric.name]] = int(metric.value)
        elif metric.name == _PER_POSITION:
            per_position = tuple(int(value) for value in metric.values)
    return VllmCounters(**found, accepted_per_position=per_position)
