"""Times of a batch's requests, as vLLM's own request metrics give them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestTimes:
    """Samples in ms, rounded to 1 us; the definitions are those of `vllm bench serve`."""

    ttft_ms: tuple[float, ...]
    """Time to first token: from a request's arrival to its first token, one a request."""

    tpot_ms: tuple[float, ...]
    """Time per output token: (e2e - TTFT) / (output tokens - 1), one a request of two tokens or
    more."""

    itl_ms: tuple[float, ...]
    """Inter-token latencies: from one output of a request to its next, whatever number of tokens
    a step puts out. Distinct values, in ascending order."""

    itl_counts: tuple[int, ...]
    """How often each of `itl_ms` occurred: requests that decode together share theirs."""
