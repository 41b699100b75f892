"""A worker's counters on vLLM's own /metrics, in `vllm serve`.

The server and its workers are different processes, so they share a folder of metric files. With
several API servers vLLM has such a folder already (PROMETHEUS_MULTIPROC_DIR) and shows whatever
is in it; with one, the plugin makes a folder when it is loaded in the server, leaves its name to
the processes that the server starts, and adds the folder to /metrics.
"""

import os
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.multiprocess import MultiProcessCollector

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.contract import Feature, lost
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.records.metrics import Labels, MetricFiles, WindowMetrics, labels_of, process_name
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import WindowPlace

SWITCH = "VLLM_NWOR_METRICS"
"""0: no metrics (a sweep has its own); anything else, or nothing: in `vllm serve`."""

FOLDER = "VLLM_NWOR_METRICS_DIR"
"""The folder of one server's metric files; the plugin sets it."""

VLLM_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

_own_folder: TemporaryDirectory[str] | None = None


def share_folder() -> None:
    """In the first process of a server: make the folder, and show it on /metrics."""
    global _own_folder
    if os.environ.get(SWITCH) == "0" or FOLDER in os.environ or lost(Feature.LIVE) is not None:
        return
    _own_folder = TemporaryDirectory(prefix="nwor-metrics-")
    os.environ[FOLDER] = _own_folder.name
    MultiProcessCollector(REGISTRY, _own_folder.name)  # type: ignore[no-untyped-call]


def folder_of(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for a worker's files; None if metrics are off. Raises ConfigError if missing."""
    if environ.get(SWITCH) == "0":
        return None
    for name in (VLLM_FOLDER, FOLDER):
        if environ.get(name):
            folder = Path(environ[name])
            if not folder.is_dir():
                raise ConfigError.for_field(name, str(folder), "name an existing folder")
            return folder
    return None


def publish(hook: RunnerHook, worker: Any, settings: PluginSettings) -> None:
    """Count the worker's windows for /metrics from now on, if metrics are on."""
    folder = folder_of()
    if folder is None:
        return
    metrics = WindowMetrics(MetricFiles(folder, process_name(global_rank(worker))))
    labels = cache(partial(worker_labels, worker))
    begun = labels(settings.mode_name, settings.scv_mode)

    def count(window: WindowRecord, _: WindowPlace | None) -> None:
        if not window.draft_tokens:  # k = 0, if draft counts are interleaved
            return
        if settings.interleave:  # counts come late, when the hook's modes are others
            metrics.add(window, begun)
        else:
            metrics.add(window, labels(hook.nwor_mode, hook.validator.mode))

    metrics.begin(begun)
    hook.accumulator.listeners.append(count)


def live_files(worker: Any, settings: PluginSettings) -> tuple[MetricFiles, Labels] | None:
    """Files for what a live comparison shows, apart from the worker's counters, and their labels;
    None if metrics are off."""
    folder = folder_of()
    if folder is None:
        return None
    files = MetricFiles(folder, f"{process_name(global_rank(worker))}-live")
    return files, worker_labels(worker, settings.mode_name, settings.scv_mode)


def publish_refusal(reason: str, worker: Any, settings: PluginSettings) -> None:
    """Count once, under its reason, that this worker has no hook and counts no window."""
    folder = folder_of()
    if folder is None:
        return
    labels = worker_labels(worker, settings.mode_name, settings.scv_mode)
    files = MetricFiles(folder, process_name(global_rank(worker)))
    files.add("nwor_fallback_count", (*labels, ("reason", reason)), 1)
    files.close()


def worker_labels(worker: Any, nwor_mode: str, scv_mode: str) -> Labels:
    """The labels of a worker's samples in these modes."""
    return labels_of(pair_name(worker.vllm_config), nwor_mode, scv_mode, global_rank(worker))


def global_rank(worker: Any) -> int:
    """The worker's number among all of a server's, over its data-parallel engines."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def pair_name(config: Any) -> str:
    """Target and drafter as a label: hub names, or the last part of a folder's path."""
    speculative = config.speculative_config
    drafter = speculative.model if speculative.uses_draft_kv_cache() else None
    return f"{_short(config.model_config.model)} + {_short(drafter or speculative.method)}"


def _short(name: str) -> str:
    return Path(name).name if Path(name).is_absolute() else name
