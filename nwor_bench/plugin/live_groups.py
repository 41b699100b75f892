"""Groups and spans of a server's windows: times and tokens of each cell, in bounded memory.

A group counts if no window was skipped, all used windows are timed, and all are in one class of
batch sizes (`records.window_groups`). Cell 0 is the reference, off or k = 0; the last cell is the
reference again, for the A/A groups, which stand for cell 0 in what is published.

Tokens of draft counts count from the fifth window in a row that verifies the same k, without
accepted drafts behind a request's last token.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from nwor_bench.instruments.draft_counts import MAX_KEPT, server_counts
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.metrics import Labels
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_groups import judge_group
from nwor_bench.records.window_order import ALL, WindowPlace, compared, size_class

UNSETTLED = 4
"""Windows behind a change of k whose tokens do not count."""

Series = tuple[str, int]
"""A class of batch sizes, or all, and a cell; cell 0 stands for A/A."""


@dataclass(frozen=True)
class LiveKind:
    """What a server interleaves, and how its metrics are named."""

    counts: Sequence[int] | None = None
    """Draft count of each cell; None: the cells are off, stage, and off again."""
    kept: int = 4096
    """Latest groups of a series whose effects are kept: of a window of 8 ms in one class, the last
    four and a half minutes without a prefill."""
    every_s: float = 2.0
    """How often metrics are updated. Of 4,096 groups an estimate takes 10 ms of one core."""
    never: LeftOut = LeftOut.DRAFTS
    """Reason for which no group of this kind is left out."""

    @property
    def cells(self) -> int:
        """Cells of the order; the last one is the reference again."""
        return 3 if self.counts is None else len(self.counts)

    def metric(self, what: str, series: Series) -> tuple[str, Labels] | None:
        """Name and labels of a series' `groups` or `ratio`; None if it is not published."""
        (size, cell), num_reqs = series, (("num_reqs", series[0]),)
        if self.counts is not None:
            name = {"ratio": "time_ratio"}.get(what, what)
            return f"nwor_drafts_{name}", (*num_reqs, ("drafts", str(cell)))
        if cell:
            return f"nwor_live_{what}", num_reqs
        return (f"nwor_live_aa_{what}", num_reqs) if size == ALL else None

    @property
    def left_out(self) -> str:
        """Name of the counter of groups that do not count."""
        return f"nwor_{'live' if self.counts is None else 'drafts'}_groups_left_out"


MODES = LiveKind()


def drafts_kind(most: int) -> LiveKind:
    """Draft counts from 0 to `most`."""
    return LiveKind(server_counts(most), MAX_KEPT, 5.0, LeftOut.FALLBACK)  # nothing is staged


class Groups:
    """Collects windows into groups. One thread adds, another reads under `lock`.

    `effects` are log ratios over the reference, oldest first, `groups` their numbers, and
    `left_out` groups without one.
    """

    def __init__(self, kind: LiveKind) -> None:
        self.kind = kind
        self.effects: dict[Series, deque[float]] = {}
        self.groups: Counter[Series] = Counter()
        self.left_out: Counter[LeftOut] = Counter()
        self.clock: str | None = None
        """`device` (CUDA events), or `host` if there are none; None before the first group."""
        self.lock = Lock()
        self._members: list[tuple[WindowRecord, WindowPlace]] = []

    def add(self, window: WindowRecord, place: WindowPlace | None) -> None:
        """Take a finished window; windows come in the order in which they ran."""
        if place is None:
            return
        if self._members and self._members[0][1].group != place.group:
            self._close()
        self._members.append((window, place))
        if place.is_last:
            self._close()

    def _close(self) -> None:
        members, self._members = self._members, []
        counts = self.kind.counts
        used = compared(members[0][1].run_length, counts=counts is not None)
        judged = judge_group(members, used=used, size=_class_of, drafts=counts)
        with self.lock:
            if isinstance(judged, LeftOut):
                self.left_out[judged] += 1
                return
            self.clock, effect = "device", judged.device
            if effect is None:
                self.clock, effect = "host", judged.host
            cell = max(place.cell for _, place in members) % (self.kind.cells - 1)
            for series in ((_class_of(judged.windows[-1]), cell), (ALL, cell)):
                self.effects.setdefault(series, deque(maxlen=self.kind.kept)).append(effect)
                self.groups[series] += 1


def _class_of(window: WindowRecord) -> str:
    return size_class(window.num_reqs)


class DraftTokens:
    """Accepted drafts of spans of windows at one k. One thread adds, another reads under `lock`.

    `spans` are accepted drafts and windows of requests, oldest first, by class and draft count.
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

    def add(self, window: WindowRecord, _: WindowPlace | None = None) -> None:
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
            for name in (_class_of(window), ALL):
                span = self._span.setdefault(name, [0, 0])
                span[0] += window.accepted_tokens - (window.undelivered_tokens or 0)
                span[1] += window.num_reqs

    def _close(self) -> None:
        spans, self._span = self._span, {}
        with self.lock:
            for name, (accepted, windows) in spans.items():
                series = (name, self._k or 0)
                self.spans.setdefault(series, deque(maxlen=MAX_KEPT)).append((accepted, windows))
                self.number[series] += 1
