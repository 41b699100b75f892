"""vLLM's own request metrics of one batch: TTFT and TPOT by request, ITL by step."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nwor_bench.records.types import RequestTimes


class RequestMetrics:
    """Reads the metrics that vLLM keeps unless `disable_log_stats` is set.

    TTFT and TPOT come from `RequestOutput.metrics`. That has no inter-token latencies: vLLM hands
    these to its stat loggers step by step, so a logger of ours stands beside its own.
    """

    def __init__(self, llm: Any):
        self._steps = _StepLatencies()
        manager = getattr(llm.llm_engine, "logger_manager", None)
        if manager is not None:
            manager.stat_loggers.append(self._steps)

    def begin(self) -> None:
        """Forget the steps before the batch."""
        self._steps.latencies = []

    def end(self, outputs: Sequence[Any]) -> RequestTimes | None:
        """Times of the batch with these RequestOutputs; None where vLLM kept no metrics."""
        stats = [output.metrics for output in outputs]
        if not stats or None in stats:
            return None
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        itl = Counter(_ms(latency) for step in self._steps.latencies for latency in step)
        ordered = sorted(itl.items())
        return RequestTimes(
            ttft_ms=tuple(_ms(own.first_token_latency) for own in stats),
            # vLLM's decode time, its clock being the engine core's at both ends.
            tpot_ms=tuple(
                _ms((own.last_token_ts - own.first_token_ts) / (length - 1))
                for own, length in zip(stats, lengths, strict=True)
                if length > 1
            ),
            itl_ms=tuple(latency for latency, _ in ordered),
            itl_counts=tuple(times for _, times in ordered),
        )


class _StepLatencies:
    """A stat logger of vLLM's (`StatLoggerManager`) that keeps each step's list."""

    def __init__(self) -> None:
        self.latencies: list[list[float]] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """One step of the engine."""
        if iteration_stats is not None and iteration_stats.inter_token_latencies_iter:
            self.latencies.append(iteration_stats.inter_token_latencies_iter)

    def log(self) -> None:
        """Nothing is logged."""

    def log_engine_initialized(self) -> None:
        """Nothing is logged."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """The engine never sleeps here."""

    def record_admission_rejection(self, reason: str) -> None:
        """Nothing is counted."""


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
