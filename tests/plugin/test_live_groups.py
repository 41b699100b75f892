"""Windows of a server to /metrics, by mode and by draft count: what counts, and what is shown."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from live_windows import counts_of, verified
from planted_windows import DRAFTS, Placed, shown, windows_of_drafts, windows_of_modes
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.live.reading import reading_of
from nwor_bench.plugin import live, live_groups
from nwor_bench.plugin.live import LivePublisher
from nwor_bench.plugin.live_groups import (
    MODES,
    UNSETTLED,
    DraftTokens,
    Groups,
    LiveKind,
    drafts_kind,
)
from nwor_bench.records.fallback_reasons import Guard, LeftOut
from nwor_bench.records.metrics import DRAFT_METRICS, LIVE_METRICS, MetricFiles, labels_of
from nwor_bench.records.types import WindowRecord
from nwor_bench.records.window_order import ALL, WindowPlace, compared, places_of_group
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import log_tokens, robust_location

GOLDEN = Path(__file__).parents[1] / "golden" / "live"
COUNTS = drafts_kind(DRAFTS)
KINDS = pytest.mark.parametrize("kind", [MODES, COUNTS], ids=["modes", "drafts"])


def places(kind: LiveKind, number: int, cell: int = 1) -> list[WindowPlace]:
    return places_of_group((0, cell), number, 2 if kind is MODES else 3)


def group(
    kind: LiveKind, number: int = 0, cell: int = 1, ms: float = 9.7, size: int = 2
) -> list[Any]:
    """A whole group in which the reference takes 10 ms, and a window beside a switch longer."""
    members = []
    for place in places(kind, number, cell):
        used = compared(place.run_length, counts=kind is COUNTS)
        wall = 50.0 + 40 * place.cell if place.position not in used else ms if place.cell else 10.0
        k = 4 if kind is MODES else place.cell % (DRAFTS + 1)
        members.append((verified(k, size, wall_ms=wall), place))
    return members


def groups_of(kind: LiveKind, *windows: Placed) -> Groups:
    found = Groups(kind)
    for window, place in windows:
        found.add(window, place)
    return found


@KINDS
def test_a_group_compares_the_windows_that_are_not_beside_a_switch(kind: LiveKind) -> None:
    again = kind.cells - 1
    windows = [*group(kind), *group(kind, 1, size=7, ms=9.0), *group(kind, 2, again, ms=10.1)]
    found = groups_of(kind, *windows)
    effects = {name: [round(exp(each), 9) for each in own] for name, own in found.effects.items()}
    assert effects == {
        ("2", 1): [0.97], ("5-8", 1): [0.9], (ALL, 1): [0.97, 0.9], ("2", 0): [1.01],
        (ALL, 0): [1.01],
    }  # fmt: skip
    assert (found.left_out, found.clock) == ({}, "host")


@pytest.mark.parametrize(
    ("kind", "at", "window", "reason"),
    [
        (MODES, 1, verified(4, 2), LeftOut.UNTIMED),
        (MODES, 3, verified(4, 2, wall_ms=10.0, device_ms=9.0), LeftOut.UNTIMED),
        (MODES, 5, verified(4, 2, wall_ms=9.7, fallback_reason="kv_transfer"), LeftOut.FALLBACK),
        (MODES, 7, verified(4, 3, wall_ms=10.0), LeftOut.BATCH_SIZE),
        (COUNTS, 4, verified(0, 2, wall_ms=9.7), LeftOut.DRAFTS),
        (COUNTS, 1, verified(1, 2, wall_ms=10.0), LeftOut.DRAFTS),
        (COUNTS, 7, verified(1, 2, wall_ms=None), LeftOut.UNTIMED),
        (COUNTS, 10, verified(0, 3, wall_ms=10.0), LeftOut.BATCH_SIZE),
    ],
)
def test_a_window_spoils_its_group(kind: LiveKind, at: int, window: Any, reason: LeftOut) -> None:
    spoiled = group(kind)
    spoiled[at] = (window, spoiled[at][1])
    found = groups_of(kind, *spoiled, *group(kind, 1))
    assert found.left_out == {reason: 1}
    assert found.groups == {("2", 1): 1, (ALL, 1): 1}


@KINDS
def test_a_group_cut_short_is_left_out_and_spoils_no_other(kind: LiveKind) -> None:
    for given in range(1, len(places(kind, 0))):
        found = groups_of(
            kind, *group(kind)[:given], (verified(4, 2, wall_ms=77.0), None), *group(kind, 1)
        )
        assert found.left_out == {LeftOut.INTERRUPTED: 1}
        assert [*found.effects[ALL, 1]] == [pytest.approx(log(0.97))]


def test_the_devices_clock_decides_if_there_is_one() -> None:
    own = [(replace(w, device_ms=9.0 if p.cell else 10.0), p) for w, p in group(MODES)]
    found = groups_of(MODES, *own)
    assert (found.clock, [*found.effects[ALL, 1]]) == ("device", [pytest.approx(log(0.9))])


@KINDS
def test_memory_is_bounded_and_the_latest_groups_stay(kind: LiveKind) -> None:
    found = Groups(replace(kind, kept=16))
    for number in range(300):
        whole = group(kind, number, ms=9.0 if number >= 84 else 5.0)
        for window, place in whole if number < 100 else whole[:1]:  # the last never end
            found.add(window, place)
    assert found.groups == {("2", 1): 100, (ALL, 1): 100}
    assert {len(effects) for effects in found.effects.values()} == {16}
    assert all(effect == pytest.approx(log(0.9)) for effect in found.effects[ALL, 1])
    assert len(found._members) == 1


@pytest.mark.slow
@pytest.mark.parametrize("effect", [0.0, 0.003, -0.03])
def test_a_planted_effect_is_found_among_arrivals_and_drift(effect: float) -> None:
    """1,500 groups whose clocks drift and jump, a sixth of them cut short by a prefill."""
    draw = random.Random(f"effect {effect}")
    groups, clock = Groups(MODES), 1.0
    for number in range(1500):
        order = draw.choice([(0, 1), (1, 0)])
        cut = draw.randrange(1, 8) if draw.random() < 1 / 6 else 8
        requests = draw.choice([3, 4, 5, 8])
        for place in places_of_group(order, number, 2)[:cut]:
            clock = draw.choice([1.0, 1.3]) if draw.random() < 0.02 else clock * 1.0002
            ms = 8.0 * clock * (1 + requests / 50) * exp(draw.gauss(effect * place.cell, 0.01))
            groups.add(verified(4, requests, wall_ms=ms), place)
    assert groups.left_out[LeftOut.INTERRUPTED] == pytest.approx(250, rel=0.2)
    assert set(groups.groups) == {("3-4", 1), ("5-8", 1), (ALL, 1)}
    for effects in groups.effects.values():
        located = robust_location(effects)
        assert located is not None
        ratio = located.exp()
        assert abs(ratio.value - exp(effect)) < 2 * ratio.half_width


# Tokens of draft counts.


def all_taken(k: int, **more: Any) -> list[WindowRecord]:
    """Windows behind a change to k that accept all, and do not count."""
    return [verified(k, 2, 2 * k, **more)] * UNSETTLED


@pytest.mark.parametrize(
    ("windows", "spans"),
    [
        (  # a run of four gives no span
            [*all_taken(2), verified(1, 2), *all_taken(2), verified(2, 2, 1), verified(2, 2, 3)],
            {("2", 2): [(4, 4)], (ALL, 2): [(4, 4)]},
        ),
        (  # tokens that nobody got
            [*all_taken(2, undelivered_tokens=9), verified(2, 2, 4),
             verified(2, 2, 3, undelivered_tokens=2), verified(2, 2)],
            {("2", 2): [(5, 6)], (ALL, 2): [(5, 6)]},
        ),
        (  # several counts in one window
            [*all_taken(2), verified(2, 2, 1), counts_of(2, draft_tokens=3, accepted_tokens=3),
             verified(2, 2, 1)],
            {("2", 2): [(2, 4)], (ALL, 2): [(2, 4)]},
        ),
        (  # a span over two classes counts for each
            [*all_taken(1), verified(1, 2, 2), verified(1, 7, 5)],
            {("2", 1): [(2, 2)], ("5-8", 1): [(5, 7)], (ALL, 1): [(7, 9)]},
        ),
    ],
    ids=["the fifth", "undelivered", "uneven", "two classes"],
)  # fmt: skip
def test_tokens_count_from_the_fifth_window_at_one_k(
    windows: Sequence[WindowRecord], spans: dict[Any, Any]
) -> None:
    tokens = DraftTokens()
    for each in [*windows, verified(0, 2)]:
        tokens.add(each)
    assert {name: list(own) for name, own in tokens.spans.items()} == spans
    assert tokens.number == {name: len(own) for name, own in spans.items()}
    even = [w.draft_tokens // w.num_reqs for w in windows if w.draft_tokens % w.num_reqs == 0]
    assert tokens.windows == Counter([*even, 0])


def test_the_latest_spans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_groups, "MAX_KEPT", 16)
    tokens = DraftTokens()
    for number in range(100):
        for window in [*all_taken(1), verified(1, 2, int(number >= 84)), verified(0, 2)]:
            tokens.add(window)
    assert list(tokens.spans["2", 1]) == [(1, 2)] * 16
    assert tokens.number == {("2", 1): 100, (ALL, 1): 100}


@pytest.mark.slow
def test_intervals_of_tokens_include_the_truth_in_95_percent_of_runs() -> None:
    """60 spans of 20 windows: each begins at another place of the text, and requests of different
    ease last for three spans."""
    hits, runs, k, ease = 0, 400, 3, (0.4, 0.9)
    mean = [np.mean([p**j for p in np.linspace(*ease, 2001)]) for j in (1, 2, 3)]
    truth = log(1 + sum(mean))
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        spans = []
        for p in np.repeat(rng.uniform(*ease, 20), 3):
            accepted = np.cumprod(rng.random((20, k)) < p, axis=1).sum()
            spans.append((float(accepted), 20.0))
        accepted, windows = zip(*spans, strict=True)
        found = log_tokens(accepted, windows)
        assert found is not None
        hits += abs(found.value - truth) < found.half_width
    assert 0.91 < hits / runs < 0.985


def test_a_span_weighs_by_its_windows() -> None:
    found = log_tokens([2.0, 30.0] * 10, [1.0, 60.0] * 10)
    assert found is not None
    assert exp(found.value) == pytest.approx(1 + 32 / 61)
    assert all(log_tokens([1.0] * n, [1.0] * n) is None for n in (0, 9))


# What is published.


class Shown:
    """A publisher, and what a scrape of its folder shows."""

    def __init__(self, folder: Path, kind: LiveKind) -> None:
        self.folder, self.groups = folder, Groups(kind)
        self.tokens = DraftTokens() if kind is COUNTS else None
        self.stopped: Guard | None = None
        files, mode = MetricFiles(folder, "nwor-0-1-live"), ["interleave", "graph"]
        self.labels = labels_of("a + b", *(mode if kind is MODES else ["off", "off"]), 0)
        if kind is COUNTS:
            speculation = (("method", "eagle3"), ("model", "a/b"))
            files.set("nwor_drafts_info", (*self.labels, *speculation), 1)
        self.publisher = LivePublisher(
            self.groups, files, self.labels, tokens=self.tokens,
            stopped=(lambda: self.stopped) if kind is MODES else None,
        )  # fmt: skip

    def add(self, windows: Sequence[Placed] | Iterator[Placed]) -> None:
        """Take windows, and publish now and then."""
        for number, (window, place) in enumerate(windows):
            self.groups.add(window, place)
            if self.tokens is not None:
                self.tokens.add(window)
            if number % 500 == 0:
                self.publisher.publish()

    def scrape(self) -> dict[tuple[str, str], float]:
        """Value by sample's name and labels but the worker's."""
        return samples_of(shown(self.folder), dict(self.labels))


def samples_of(page: str, every: dict[str, str]) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            assert sample.labels.items() >= every.items()
            own = sorted(sample.labels.items() - every.items())
            found[sample.name, " ".join(value for _, value in own)] = sample.value
    return found


GROUPS = [pair for n in range(50) for pair in group(MODES, n, ms=9.7 + n % 5 / 100)]


@pytest.fixture
def modes(tmp_path: Path) -> Shown:
    return Shown(tmp_path, MODES)


@pytest.fixture
def drafts(tmp_path: Path) -> Shown:
    return Shown(tmp_path, COUNTS)


@pytest.mark.parametrize("kind", ["modes", "drafts"])
def test_planted_windows_are_published_as_the_golden_file_shows(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """`live` says of that file what test_live_golden.py holds."""
    own = request.getfixturevalue(kind)
    own.publisher.publish()
    own.add(windows_of_modes() if kind == "modes" else windows_of_drafts())
    own.publisher.publish()
    page = (GOLDEN / f"published_{kind}.prom").read_text(encoding="utf-8")
    assert own.scrape() == pytest.approx(samples_of(page, dict(own.labels)))
    comments = [{line for line in text.splitlines() if line[0] == "#"}
                for text in (page, shown(own.folder))]  # fmt: skip
    assert comments[0] == comments[1]


LEFT_OUT = ["interrupted", "batch_size", "untimed"]


@pytest.mark.parametrize(
    ("kind", "prefix", "start"),
    [
        ("modes", "live", {"groups": [ALL], "aa_groups": [ALL], "staging_stopped": [*Guard],
                           "groups_left_out": [*LEFT_OUT, "fallback"]}),
        ("drafts", "drafts", {"groups": ["0 all", "1 all", "2 all"], "spans": ["1 all", "2 all"],
                              "windows": [*"012"], "groups_left_out": [*LEFT_OUT, "drafts"]}),
    ],
)  # fmt: skip
def test_counters_stand_at_0_before_the_first_group(
    request: pytest.FixtureRequest, kind: str, prefix: str, start: dict[str, list[str]]
) -> None:
    own = request.getfixturevalue(kind)
    own.publisher.publish()
    found = own.scrape()
    assert found.pop(("nwor_drafts_info", "eagle3 a/b"), 1) == 1
    every = [(name, labels) for name, each in start.items() for labels in each]
    assert found == {(f"nwor_{prefix}_{name}_total", str(labels)): 0 for name, labels in every}


def test_the_guard_that_stopped_staging_is_shown(modes: Shown) -> None:
    modes.publisher.publish()
    modes.stopped = Guard.RANKS_DIFFER
    modes.publisher.publish()
    found = modes.scrape()
    stopped = {guard: found["nwor_live_staging_stopped_total", str(guard)] for guard in Guard}
    assert stopped == {guard: guard is Guard.RANKS_DIFFER for guard in Guard}


def test_a_thread_publishes_and_a_failed_update_is_counted_and_tried_again(
    modes: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes.groups, "kind", LiveKind(every_s=0.001))
    modes.publisher.start()
    began = modes.scrape()["nwor_live_updated_seconds", ""]
    broken = threading.Event()

    def fail(*_: object) -> None:
        broken.set()
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(live, "robust_location", fail)
        modes.add(GROUPS)
        assert broken.wait(10)
    wait_until(lambda: modes.scrape()["nwor_live_updated_seconds", ""] > began)
    modes.add(GROUPS)
    wait_until(lambda: ("nwor_live_ratio", "host all") in modes.scrape())
    modes.publisher.stop()
    assert modes.scrape()["nwor_live_failed_updates_total", "OSError"] >= 1


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_metrics_that_cannot_be_written_grow_old(
    modes: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the failure can be counted: the thread ends, and its last time stays."""
    modes.publisher.start()
    modes.publisher.stop()
    for member in GROUPS:
        modes.groups.add(*member)
    before = modes.scrape()
    monkeypatch.setattr(MetricFiles, "add", Mock(side_effect=OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        modes.publisher.update()
    assert modes.scrape() == before
    monkeypatch.undo()
    modes.publisher.update()
    assert modes.scrape()["nwor_live_groups_total", ALL] == 50


def assert_same(found: Interval, truth: Interval | None) -> None:
    assert truth is not None
    assert found.value == pytest.approx(truth.value)
    assert found.error == pytest.approx(truth.error)
    assert (found.degrees, found.count) == (truth.degrees, truth.count)


def test_estimates_come_back_from_the_metrics(drafts: Shown) -> None:
    drafts.add(windows_of_drafts())
    drafts.publisher.publish()
    reading, size = reading_of(shown(drafts.folder), "http://h/metrics"), "9-16"
    at_size = reading._at_size(size)
    assert drafts.tokens is not None
    for k in (1, 2):
        assert_same(at_size.times[k], robust_location(list(drafts.groups.effects[size, k])))
        accepted, windows = zip(*drafts.tokens.spans[size, k], strict=True)
        assert_same(at_size.tokens.logs[k], log_tokens(accepted, windows))
    assert_same(at_size.times[None], robust_location(list(drafts.groups.effects[size, 0])))
    assert (reading.clock, reading.pair.method, reading.pair.draft) == ("host", "eagle3", "a/b")
    assert set(reading.worth().noise) == {1, 16}


def test_every_metric_is_told_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for metric in (*DRAFT_METRICS, *LIVE_METRICS):
        assert f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}" in page
