"""Draft counts in a server: time and tokens of a window at each k, from its windows to /metrics.

Memory is bounded: the latest groups and spans of each class of batch sizes and k. `draft_turns` has
the order; each step brings its place. The first window of each run follows a switch and the last
one drafts for the next run: neither is used. Tokens count from the fifth window in a row that
verifies the same k, without accepted drafts behind a request's last token.
"""

from collections import Counter, deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.draft_counts import KEPT
from nwor_bench.plugin.draft_turns import counts_of
from nwor_bench.plugin.interleaving import FollowedScheduler
from nwor_bench.plugin.live_groups import REFERENCE, Groups, LivePublisher
from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.runner_hook import RunnerHook
from nwor_bench.plugin.settings import DRAFTS, PluginSettings
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.metrics import Labels, MetricFiles
from nwor_bench.records.types import MeasuredWindow, NworMode, ScvMode
from nwor_bench.records.window_order import ALL, WindowPlace, compared, size_class
from nwor_bench.stats.robust import log_tokens, robust_location

UNSETTLED = 4
"""Windows behind a change of k whose tokens do not count."""

Series = tuple[str, int]
"""A class of batch sizes, or all, and a draft count."""


class DraftGroups(Groups[Series]):
    """Groups of k = 0 and another k, by class of batch sizes; k = 0 stands for A/A."""

    def __init__(self, most: int) -> None:
        super().__init__(KEPT)
        self._counts = counts_of(most)

    def names(self, members: Sequence[tuple[MeasuredWindow, WindowPlace]]) -> Sequence[Series]:
        """The class and all, each with the other draft count."""
        k = next(self._counts[p.cell] for _, p in members if p.cell != REFERENCE)
        return (size_class(members[-1][0].num_reqs), k), (ALL, k)

    def is_used(self, place: WindowPlace) -> bool:
        """False for both ends of a run."""
        return place.position in compared(place.run_length, counts=True)

    def problem(self, window: MeasuredWindow, place: WindowPlace) -> LeftOut | None:
        """Each request must have verified its place's draft count."""
        wanted = window.num_reqs * self._counts[place.cell]
        return None if window.draft_tokens == wanted else LeftOut.DRAFTS


class DraftTokens:
    """Accepted drafts of spans of windows at one k. One thread adds, another reads under `lock`.

    `spans` are accepted drafts and windows of requests, oldest first.
    """

    def __init__(self) -> None:
        self.spans: dict[Series, deque[tuple[int, int]]] = {}
        self.number: Counter[Series] = Counter()
        self.windows: Counter[int] = Counter()
        """Windows by draft count; those whose requests verified different numbers are left out."""
        self.lock = Lock()
        self._k: int | None = None
        self._in_a_row = 0
        self._span: dict[str, list[int]] = {}

    def add(self, window: MeasuredWindow) -> None:
        """Take a finished window, with a prefill beside it or not."""
        k, rest = divmod(window.draft_tokens, window.num_reqs)
        if rest:
            return
        if k != self._k:
            self._close()
            self._k, self._in_a_row = k, 0
        self._in_a_row += 1
        with self.lock:
            self.windows[k] += 1
        if k and self._in_a_row > UNSETTLED:
            for name in (size_class(window.num_reqs), ALL):
                span = self._span.setdefault(name, [0, 0])
                span[0] += window.accepted_tokens - (window.undelivered_tokens or 0)
                span[1] += window.num_reqs

    def _close(self) -> None:
        spans, self._span = self._span, {}
        with self.lock:
            for name, (accepted, windows) in spans.items():
                series = (name, self._k or 0)
                self.spans.setdefault(series, deque(maxlen=KEPT)).append((accepted, windows))
                self.number[series] += 1


class DraftPublisher(LivePublisher):
    """Writes times and tokens into metric files of its own."""

    every_s = 5.0

    def __init__(
        self,
        groups: DraftGroups,
        tokens: DraftTokens,
        most: int,
        files: MetricFiles,
        labels: Labels,
    ):
        super().__init__(files, labels)
        self._groups = groups
        self._tokens = tokens
        self._most = most

    def publish(self) -> None:
        """Write what has changed since the last call."""
        self._publish_times()
        self._publish_tokens()

    def _publish_times(self) -> None:
        groups = self._groups
        with groups.lock:
            number = dict.fromkeys(((ALL, k) for k in range(self._most + 1)), 0) | groups.groups
            left_out = dict(groups.left_out)
            effects = {series: list(each) for series, each in groups.effects.items()}
        for series, count in number.items():
            if self._raise_to("nwor_drafts_groups", _labels(series), count):
                located = robust_location(effects.get(series, []))
                if located is not None:
                    clock = (*_labels(series), ("clock", str(groups.clock)))
                    self._show("nwor_drafts_time_ratio", clock, located.exp())
        for reason in set(LeftOut) - {LeftOut.FALLBACK}:  # nothing is staged
            labels = (("reason", str(reason)),)
            self._raise_to("nwor_drafts_groups_left_out", labels, left_out.get(reason, 0))

    def _publish_tokens(self) -> None:
        tokens, counts = self._tokens, range(self._most + 1)
        with tokens.lock:
            number = dict.fromkeys(((ALL, k) for k in counts if k), 0) | tokens.number
            spans = {series: list(each) for series, each in tokens.spans.items()}
            windows = dict.fromkeys(counts, 0) | tokens.windows
        for series, count in number.items():
            if self._raise_to("nwor_drafts_spans", _labels(series), count):
                own = spans.get(series, [])
                located = log_tokens([a for a, _ in own], [w for _, w in own])
                if located is not None:
                    self._show("nwor_drafts_tokens", _labels(series), located.exp())
        for k, count in windows.items():
            self._raise_to("nwor_drafts_windows", (("drafts", str(k)),), count)


def _labels(series: Series) -> Labels:
    return ("num_reqs", series[0]), ("drafts", str(series[1]))


class LiveDrafts:
    """The windows of this worker are measured by draft count, and /metrics shows what they give.

    Raises ConfigError if the runner's drafter drafts the same number at every k.
    """

    def __init__(self, hook: RunnerHook, worker: Any, settings: PluginSettings):
        from nwor_bench.plugin import refusals  # imports vLLM

        constant, config = refusals.constant_drafter(hook.runner), worker.vllm_config
        speculative = config.speculative_config
        most = speculative.num_speculative_tokens
        if constant is not None:
            remedy = f"vLLM's {constant} drafts {most} tokens at every draft count; unset {DRAFTS}"
            raise ConfigError.for_field("--speculative-config: method", speculative.method, remedy)
        self._hook = hook
        self._groups, self._tokens = DraftGroups(most), DraftTokens()
        self._publisher = None
        own = metrics.live_files(worker, settings)
        if own is not None:
            files, labels = own
            files.set("nwor_drafts_info", (*labels, *_speculation(speculative)), 1)
            self._publisher = DraftPublisher(self._groups, self._tokens, most, files, labels)
        hook.accumulator.listeners.append(self._add)

    def start(self) -> None:
        """Begin to measure."""
        self._hook.set_modes(NworMode.OFF, ScvMode.OFF)
        self._hook.interleave(FollowedScheduler(self._hook))
        if self._publisher is not None:
            self._publisher.start()

    def undo(self) -> None:
        """End it, because the hook could not be attached."""
        if self._publisher is not None:
            self._publisher.stop()

    def _add(self, window: MeasuredWindow, place: WindowPlace | None) -> None:
        self._groups.add(window, place)
        self._tokens.add(window)


def _speculation(config: Any) -> Labels:
    """Method and drafter as --speculative-config names them; no model if it is the target's own."""
    own = config.method == "mtp"
    return ("method", config.method), ("model", "" if own else config.model or "")
