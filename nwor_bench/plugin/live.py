"""Interleaved cells of a server: windows are measured in this worker, and shown on /metrics."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.plugin.interleaving import LiveModes, ModeSwitch
from nwor_bench.plugin.live_groups import MODES, DraftTokens, Groups, drafts_kind
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import DRAFTS, PluginSettings
from nwor_bench.records.fallback_reasons import Guard, LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles
from nwor_bench.records.window_order import ALL
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import log_tokens, robust_location

logger = logging.getLogger("vllm.nwor_bench")


class LivePublisher:
    """Writes what has changed into metric files of its own, again and again, in a thread.

    Args:
        tokens: of draft counts.
        stopped: the guard that stopped staging, of modes.
    """

    def __init__(
        self,
        groups: Groups,
        files: MetricFiles,
        labels: Labels,
        *,
        tokens: DraftTokens | None = None,
        stopped: Callable[[], Guard | None] | None = None,
    ):
        self._groups = groups
        self._tokens = tokens
        self._stopped = stopped
        self._files = files
        self._labels = labels
        self._shown: dict[tuple[str, Labels], int] = {}
        self._end = Event()
        self._failed: set[str] = set()

    def start(self) -> None:
        """Show counters at 0, and begin."""
        self.publish()
        self.update()
        Thread(target=self._run, name="nwor-live", daemon=True).start()

    def stop(self) -> None:
        """End soon."""
        self._end.set()

    def update(self) -> None:
        """Publish, and show when; a failure is counted, and the next call tries again."""
        try:
            self.publish()
            self._files.set("nwor_live_updated_seconds", self._labels, time.time())
        except Exception as error:
            reason = type(error).__name__
            if reason not in self._failed:
                logger.exception("nwor: /metrics was not updated; it is tried again and again")
            self._failed.add(reason)
            self._files.add("nwor_live_failed_updates", (*self._labels, ("reason", reason)), 1)

    def _run(self) -> None:
        while not self._end.wait(self._groups.kind.every_s):
            self.update()

    def publish(self) -> None:
        """Write what has changed since the last call."""
        self._publish_groups()
        if self._tokens is not None:
            self._publish_tokens(self._tokens)
        if self._stopped is not None:
            stopped = self._stopped()
            by_guard = {guard: int(stopped is guard) for guard in Guard}
            self._raise_by_reason("nwor_live_staging_stopped", by_guard)

    def _publish_groups(self) -> None:
        groups, kind = self._groups, self._groups.kind
        with groups.lock:
            numbers = dict.fromkeys(((ALL, cell) for cell in range(kind.cells - 1)), 0)
            numbers |= groups.groups
            left_out = {reason: groups.left_out[reason] for reason in set(LeftOut) - {kind.never}}
            effects = {series: list(logs) for series, logs in groups.effects.items()}
        for series, number in numbers.items():
            counter, gauge = kind.metric("groups", series), kind.metric("ratio", series)
            if counter is not None and gauge is not None and self._raise_to(*counter, number):
                located = robust_location(effects.get(series, []))
                if located is not None:
                    labels = (*gauge[1], ("clock", str(groups.clock)))
                    self._show(gauge[0], labels, located.exp())
        self._raise_by_reason(kind.left_out, left_out)

    def _publish_tokens(self, tokens: DraftTokens) -> None:
        cells = range(self._groups.kind.cells - 1)
        with tokens.lock:
            numbers = dict.fromkeys(((ALL, k) for k in cells if k), 0) | tokens.number
            spans = {series: list(pairs) for series, pairs in tokens.spans.items()}
            windows = dict.fromkeys(cells, 0) | tokens.windows
        for (size, k), number in numbers.items():
            labels = (("num_reqs", size), ("drafts", str(k)))
            if self._raise_to("nwor_drafts_spans", labels, number):
                pairs = spans.get((size, k), [])
                located = log_tokens([a for a, _ in pairs], [w for _, w in pairs])
                if located is not None:
                    self._show("nwor_drafts_tokens", labels, located.exp())
        for k, number in windows.items():
            self._raise_to("nwor_drafts_windows", (("drafts", str(k)),), number)

    def _raise_by_reason(self, name: str, numbers: Mapping[Any, int]) -> None:
        for reason, number in numbers.items():
            self._raise_to(name, (("reason", str(reason)),), number)

    def _raise_to(self, name: str, labels: Labels, number: int) -> bool:
        """Bring a counter to this number; True if it was another."""
        shown = self._shown.get((name, labels))
        if shown == number:
            return False
        self._files.add(name, (*self._labels, *labels), number - (shown or 0))
        self._shown[name, labels] = number
        return True

    def _show(self, name: str, labels: Labels, interval: Interval) -> None:
        """Set a gauge and the two with the ends of its interval."""
        every = (*self._labels, *labels)
        self._files.set(name, every, interval.value)
        self._files.set(f"{name}_low", every, interval.low)
        self._files.set(f"{name}_high", every, interval.high)


@dataclass
class LiveTraffic:
    """Cells are interleaved in this worker, and /metrics shows what they give."""

    switch: ModeSwitch
    groups: Groups
    publisher: LivePublisher | None
    """None if metrics are off."""

    def start(self) -> None:
        """Begin to interleave."""
        self.switch.start()
        if self.publisher is not None:
            self.publisher.start()

    def undo(self) -> None:
        """End it, because the hook could not be attached."""
        if self.publisher is not None:
            self.publisher.stop()


def live_traffic(hook: RunnerHook, worker: Any, settings: PluginSettings) -> LiveTraffic:
    """Measure the windows of this worker by mode, or by draft count.

    Raises ConfigError if the runner's drafter drafts the same number at every k.
    """
    files_and_labels = metrics.live_files(worker, settings)
    listeners, publisher = hook.accumulator.listeners, None
    if settings.drafts:
        speculative = _changing(hook, worker.vllm_config.speculative_config)
        groups, tokens = Groups(drafts_kind(speculative.num_speculative_tokens)), DraftTokens()
        if files_and_labels is not None:
            files, labels = files_and_labels
            files.set("nwor_drafts_info", (*labels, *_speculation(speculative)), 1)
            publisher = LivePublisher(groups, files, labels, tokens=tokens)
        listeners += [groups.add, tokens.add]
        return LiveTraffic(ModeSwitch(hook), groups, publisher)
    modes, groups = LiveModes(hook, settings.scv_mode), Groups(MODES)
    if files_and_labels is not None:
        publisher = LivePublisher(groups, *files_and_labels, stopped=lambda: modes.stopped)
    listeners += [lambda window, _: modes.check(window), groups.add]
    hook.late.on_overcount = modes.overcounted
    return LiveTraffic(modes, groups, publisher)


def _changing(hook: RunnerHook, config: Any) -> Any:
    """vLLM's speculative configuration, if its drafter follows the scheduler's draft count."""
    from nwor_bench.plugin import refusals  # imports vLLM

    constant, most = refusals.constant_drafter(hook.runner), config.num_speculative_tokens
    if constant is not None:
        remedy = f"vLLM's {constant} drafts {most} tokens at every draft count; unset {DRAFTS}"
        raise ConfigError.for_field("--speculative-config: method", config.method, remedy)
    return config


def _speculation(config: Any) -> Labels:
    """Method and drafter as --speculative-config names them; no model if it is the target's own."""
    is_mtp = config.method == "mtp"
    return ("method", config.method), ("model", "" if is_mtp else config.model or "")
