"""Read back from vLLM: its own counters and request metrics, and the ranks' records.

With tensor parallelism every rank counts every window, and a run stores the first rank's records.
They represent all ranks only if the ranks agree, which is checked after every batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from nwor_bench.errors import EngineError
from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.records.facts import EngineStatus, RankStatus
from nwor_bench.records.types import RequestTimes
from nwor_bench.records.window import WindowTable

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
    """Counts since `llm` (a vllm.LLM) started. Raises EngineError if vLLM has none."""
    if (reason := lost(Feature.COUNTERS)) is not None:
        raise EngineError(f"sums have nothing to be compared with: {reason}")
    counts: dict[str, int] = {}
    per_position: tuple[int, ...] = ()
    for metric in llm.get_metrics():
        if metric.name in _COUNTERS:
            counts[_COUNTERS[metric.name]] = int(metric.value)
        elif metric.name == _PER_POSITION:
            per_position = tuple(int(value) for value in metric.values)
    return VllmCounters(**counts, accepted_per_position=per_position)


def request_times(outputs: Sequence[Any]) -> RequestTimes | None:
    """Times of a batch with these RequestOutputs; None if vLLM kept no metrics."""
    stats = [output.metrics for output in outputs]
    if not stats or None in stats:
        return None
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    return RequestTimes(
        ttft_ms=tuple(_ms(request.first_token_latency) for request in stats),
        # vLLM's decode time, its clock being the engine core's at both ends.
        tpot_ms=tuple(
            _ms((request.last_token_ts - request.first_token_ts) / (length - 1))
            for request, length in zip(stats, lengths, strict=True)
            if length > 1
        ),
    )


def request_acceptance(
    outputs: Sequence[Any], counted: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, int, int], ...]:
    """Each request's windows with drafts, accepted drafts, and those of them that it got, in the
    order of the outputs."""
    counts = (counted.get(output.request_id, (0, 0, 0)) for output in outputs)
    return tuple((windows, accepted, got) for windows, accepted, got in counts)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def disagreement(tables: Sequence[WindowTable]) -> str | None:
    """How the ranks' windows differ in a count, as half a sentence; None if they agree.

    Args:
        tables: one batch as each rank recorded it, the first rank first. Times (names ending in
            `_ms`) may differ.
    """
    counts = [
        {name: column for name, column in table.items() if not name.endswith("_ms")}
        for table in tables
    ]
    first, *others = [list(zip(*table.values(), strict=True)) for table in counts]
    for rank, windows in enumerate(others, start=1):
        if len(windows) != len(first):
            return f"rank {rank} ran {len(windows)} windows and rank 0 {len(first)}"
        for number, (ours, theirs) in enumerate(zip(first, windows, strict=True)):
            for name, value, other in zip(counts[0], ours, theirs, strict=True):
                if value != other:
                    return (
                        f"window {number} has {name} {other!r} on rank {rank} and "
                        f"{value!r} on rank 0"
                    )
    return None


OF_EACH_RANK = frozenset(
    [
        "device",
        "attention_us",
        "stage_memory_bytes",
        "control_memory_bytes",
        "sham_memory_bytes",
        "sham_capture_s",
    ]
)
"""Facts that each rank has or measures for itself: its device, and what its graphs took."""


def _shared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts, and facts in them, that all ranks must have alike."""
    return {
        name: _shared(part) if isinstance(part, dict) else part
        for name, part in facts.items()
        if name not in OF_EACH_RANK
    }


def common_status(statuses: Sequence[Mapping[str, Any]]) -> EngineStatus:
    """The first rank's facts, and the facts that each rank has for itself.

    Raises EngineError if the ranks differ in another fact: with different numbers of layers, blocks
    or captured graphs they would take different paths through the same window.
    """
    first, shared = statuses[0], [_shared(status) for status in statuses]
    for rank, status in enumerate(statuses):
        for name, part in shared[0].items():
            if shared[rank][name] != part:
                raise EngineError.at(
                    f"rank {rank} has {name}",
                    f"{status[name]!r}, rank 0 {first[name]!r}: ranks that differ cannot be "
                    "measured as one engine",
                    status[name],
                    joint=" ",
                )
    facts = dict(first)
    if len(statuses) > 1:
        facts["ranks"] = [{name: s[name] for name in RankStatus.model_fields} for s in statuses]
    try:
        return EngineStatus.read(facts)
    except ValidationError as error:
        raise EngineError.at(
            "what the worker says of itself is not understood", str(error)
        ) from error
