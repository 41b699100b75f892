"""Prometheus metrics, and the files through which processes share them.

Names are those of cells.csv and run.json; a counter's samples also end in `_total`. A server's
workers count window by window.

Values live in memory-mapped files, the ones of prometheus_client's multiprocess mode: a worker
writes a number when it changes (about a microsecond), a server in another process reads them
with `MultiProcessCollector`. Labels: `pair`, `nwor_mode`, `scv_mode`, `rank`, and `reason` for
fallbacks.
"""

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from prometheus_client.mmap_dict import MmapedDict, mmap_key

from nwor_bench.records.fallback_reasons import (
    BESIDE_PREFILL,
    BREAKABLE_CUDA_GRAPHS,
    SLOWER_THAN_STOCK,
    STOCK_ATTENTION,
)
from nwor_bench.records.types import WindowRecord


@dataclass(frozen=True)
class Metric:
    """One metric: its name without `_total`, its kind and what it counts."""

    name: str
    kind: str
    help: str


COUNTER, GAUGE = "counter", "gauge"


def _with_ends(name: str, text: str, whose: str) -> tuple[Metric, Metric, Metric]:
    """A gauge, and two with the ends of its interval."""
    return (
        Metric(name, GAUGE, text),
        Metric(f"{name}_low", GAUGE, f"Low end of the {whose} 95 % interval."),
        Metric(f"{name}_high", GAUGE, f"High end of the {whose} 95 % interval."),
    )


METRICS = (
    Metric("nwor_windows", COUNTER, "Verification steps with at least one draft token."),
    Metric("nwor_draft_tokens", COUNTER, "Draft tokens that the target verified."),
    Metric("nwor_accepted_tokens", COUNTER, "Draft tokens that the target accepted."),
    Metric("nwor_total_staged", COUNTER, "Draft tokens whose K/V was kept out of the cache."),
    Metric("nwor_total_committed", COUNTER, "Staged tokens that were accepted and committed."),
    Metric("nwor_total_rejected", COUNTER, "Staged tokens that were dropped."),
    Metric("nwor_stage_operations", COUNTER, "Staged tokens times target layers."),
    Metric("nwor_fallback_count", COUNTER, "Windows that were written directly, by reason."),
    Metric("scv_graph_hits", COUNTER, "Validations replayed from a CUDA graph."),
    Metric("scv_graph_captures", COUNTER, "Validations captured into a CUDA graph."),
    Metric("scv_fallback_count", COUNTER, "Validations not done as the mode says, by reason."),
    Metric("nwor_acceptance_rate", GAUGE, "Accepted of all draft tokens so far, a fraction."),
    Metric("nwor_unique_tokens", GAUGE, "Draft tokens staged in the latest window."),
)
LIVE_METRICS = (
    *_with_ends("nwor_live_ratio", "Time of a window in stage over off, by batch size.", "ratio's"),
    Metric("nwor_live_groups", COUNTER, "Groups of windows that were compared, by batch size."),
    *_with_ends(
        "nwor_live_aa_ratio", "Time of a window in off over off: the noise floor.", "A/A ratio's"
    ),
    Metric("nwor_live_aa_groups", COUNTER, "Groups of windows in which off was compared with off."),
    Metric("nwor_live_groups_left_out", COUNTER, "Groups that do not count, by reason."),
    Metric("nwor_live_staging_stopped", COUNTER, "1: staging has stopped for good, by reason."),
    Metric("nwor_live_updated_seconds", GAUGE, "Unix time of the latest update of these metrics."),
    Metric("nwor_live_failed_updates", COUNTER, "Updates that failed, by reason."),
)
"""Only of a server with VLLM_NWOR_MODE=interleave, with further labels; the last two also of one
that interleaves draft counts."""
DRAFT_METRICS = (
    Metric("nwor_drafts_info", GAUGE, "1, with the speculative method and its model."),
    Metric("nwor_drafts_windows", COUNTER, "Windows by the drafts that each request verified."),
    *_with_ends(
        "nwor_drafts_time_ratio", "Time of a window over that at k = 0, by batch size.", "ratio's"
    ),
    Metric("nwor_drafts_groups", COUNTER, "Groups of windows behind the ratio."),
    Metric("nwor_drafts_groups_left_out", COUNTER, "Groups that do not count, by reason."),
    *_with_ends("nwor_drafts_tokens", "Tokens of a request in a window, by batch size.", "tokens'"),
    Metric("nwor_drafts_spans", COUNTER, "Spans of windows at one draft count behind the tokens."),
)
"""Only of a server with VLLM_NWOR_DRAFTS=interleave; all but two have a label `drafts`."""
BY_REASON = ("nwor_fallback_count", "scv_fallback_count")
KNOWN_REASONS = {
    "nwor_fallback_count": (
        *("adaptive_verification", "batch_invariant", "batch_sharded_sampling", BESIDE_PREFILL),
        *(BREAKABLE_CUDA_GRAPHS, "context_parallel", "data_parallel", "eplb"),
        *("full_graph_of_another_shape", "full_graph_with_uneven_windows", "kv_shape"),
        *("kv_transfer", "layer_staged_twice", "micro_batches", "more_drafts_than_capacity"),
        *("no_target_layers", "pipeline_parallel", "ranks_accepted_differently", "sleep_mode"),
        *(SLOWER_THAN_STOCK, STOCK_ATTENTION, "step_not_finished", "v1_runner_on_gpu"),
        "window_beside_prefill_of_its_request",
    ),
    "scv_fallback_count": (
        *("capture_not_supported", "more_drafts_than_capacity", "no_cuda", "sampled_ids_dtype"),
        *("sampled_ids_shape", "uneven_windows"),
    ),
}
"""Reasons that each have a series at 0 from the start: Prometheus' `increase` sees a first fallback
only if a scrape before it saw the series. Reasons that name an exception or a rank are made up
as they come, and their series begins with the first."""
BY_NAME = {metric.name: metric for metric in (*METRICS, *LIVE_METRICS, *DRAFT_METRICS)}

Labels = tuple[tuple[str, str], ...]
"""Label names and values, in a fixed order."""


class MetricFiles:
    """One process's values in a folder of metric files.

    Args:
        folder: exists; shared by all processes of one server.
        process: name of this process's files, unique in the folder.
    """

    def __init__(self, folder: Path, process: str):
        counters = folder / f"counter_{process}.db"
        gauges = folder / f"gauge_mostrecent_{process}.db"
        self._files = {COUNTER: _open(counters), GAUGE: _open(gauges)}
        self._values: dict[str, float] = defaultdict(float)

    def add(self, name: str, labels: Labels, amount: float) -> None:
        """Increase a counter; adding 0 creates it."""
        key = _key(name, labels)
        self._values[key] += amount
        self._files[COUNTER].write_value(key, self._values[key], 0.0)

    def set(self, name: str, labels: Labels, value: float) -> None:
        """Set a gauge."""
        self._files[GAUGE].write_value(_key(name, labels), value, time.time())

    def close(self) -> None:
        """Close the files; their values stay readable."""
        for file in self._files.values():
            file.close()


class WindowMetrics:
    """Counts windows into metric files."""

    def __init__(self, files: MetricFiles):
        self._files = files
        self._drafts: dict[Labels, int] = defaultdict(int)
        self._accepted: dict[Labels, int] = defaultdict(int)

    def begin(self, labels: Labels) -> None:
        """Show every counter at 0, so that the first window is seen as an increase."""
        for metric in METRICS:
            if metric.kind == COUNTER and metric.name not in BY_REASON:
                self._files.add(metric.name, labels, 0)
        for name, reasons in KNOWN_REASONS.items():
            for reason in reasons:
                self._files.add(name, (*labels, ("reason", reason)), 0)

    def add(self, window: WindowRecord, labels: Labels) -> None:
        """Count one finished window."""
        counts = {
            "nwor_windows": 1,
            "nwor_draft_tokens": window.draft_tokens,
            "nwor_accepted_tokens": window.accepted_tokens,
            "nwor_total_staged": window.staged_tokens,
            "nwor_total_committed": window.committed_tokens,
            "nwor_total_rejected": window.rejected_tokens,
            "nwor_stage_operations": window.stage_operations,
            "scv_graph_hits": window.scv_path == "graph",
            "scv_graph_captures": window.scv_path == "capture",
        }
        new = labels not in self._drafts
        for name, amount in counts.items():
            if amount or new:
                self._files.add(name, labels, amount)
        reasons = (window.fallback_reason, window.scv_fallback_reason)
        for name, reason in zip(BY_REASON, reasons, strict=True):
            if reason is not None:
                self._files.add(name, (*labels, ("reason", reason)), 1)
        self._drafts[labels] += window.draft_tokens
        self._accepted[labels] += window.accepted_tokens
        if self._drafts[labels]:
            rate = self._accepted[labels] / self._drafts[labels]
            self._files.set("nwor_acceptance_rate", labels, rate)
        self._files.set("nwor_unique_tokens", labels, window.staged_tokens)


def labels_of(pair: str, nwor_mode: str, scv_mode: str, rank: int) -> Labels:
    """The labels that every metric has."""
    return (
        ("pair", pair),
        ("nwor_mode", str(nwor_mode)),
        ("scv_mode", str(scv_mode)),
        ("rank", str(rank)),
    )


def process_name(rank: int) -> str:
    """A name for this process's files, unique among the server's processes.

    Not only the process id: vLLM's own metrics in the same folder use that name.
    """
    return f"nwor-{rank}-{os.getpid()}"


def _open(path: Path) -> Any:
    return MmapedDict(str(path))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=4096)
def _key(name: str, labels: Labels) -> str:
    """The sample's key in a file; making it takes longer than writing the value."""
    metric = BY_NAME[name]
    sample = f"{name}_total" if metric.kind == COUNTER else name
    names = [name for name, _ in labels]
    values = [value for _, value in labels]
    return mmap_key(name, sample, names, values, metric.help)
