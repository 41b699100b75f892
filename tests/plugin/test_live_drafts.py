"""Draft counts of a server: times and tokens by k, what is left out, and /metrics read back."""

import random
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_windows import counts_of as window
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from nwor_bench.live.reading import Reading, reading_of
from nwor_bench.plugin import live_groups
from nwor_bench.plugin.live import LivePublisher
from nwor_bench.plugin.live_groups import UNSETTLED, DraftTokens, Groups, drafts_kind
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.metrics import DRAFT_METRICS, LIVE_METRICS, MetricFiles, labels_of
from nwor_bench.records.window_order import ALL, places_of_group
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import log_tokens, robust_location

MOST = 2
AGAIN = MOST + 1
"""The cell of k = 0 against itself."""


def verified(k: int, accepted: int = 0, requests: int = 2, **more: Any) -> Any:
    """A window in which each request verified k drafts."""
    return window(requests, draft_tokens=k * requests, accepted_tokens=accepted, **more)


def add_group(
    groups: Groups, number: int, cell: int, ms: float, requests: int = 2, **changed: Any
) -> None:
    """One whole group; `changed` are by the window's place in it. k = 0 takes 10 ms."""
    for at, place in enumerate(places_of_group((0, cell), number, 3)):
        k = place.cell % AGAIN
        # Both ends of a run must not count.
        wall = (ms if place.cell else 10.0) if place.position == 1 else 50.0 + 40 * place.cell
        own = verified(k, requests=requests, wall_ms=wall)
        groups.add(changed.get(f"at{at}", own), place)


def test_a_group_compares_the_windows_between_the_ends_of_each_run() -> None:
    groups = Groups(drafts_kind(MOST))
    add_group(groups, 0, 1, 12.0)
    add_group(groups, 1, 2, 14.0, requests=7)
    add_group(groups, 2, AGAIN, 10.1)
    effects = {name: [exp(value) for value in values] for name, values in groups.effects.items()}
    assert effects == {
        ("2", 1): [pytest.approx(1.2)], ("5-8", 2): [pytest.approx(1.4)],
        ("2", 0): [pytest.approx(1.01)], (ALL, 0): [pytest.approx(1.01)],
        (ALL, 1): [pytest.approx(1.2)], (ALL, 2): [pytest.approx(1.4)],
    }  # fmt: skip
    assert groups.left_out == {}


@pytest.mark.parametrize(
    ("place", "window", "reason"),
    [
        (4, verified(1, wall_ms=12.0), LeftOut.DRAFTS),
        (1, verified(2, wall_ms=10.0), LeftOut.DRAFTS),
        (7, verified(2, wall_ms=None), LeftOut.UNTIMED),
        (10, verified(0, requests=3, wall_ms=10.0), LeftOut.BATCH_SIZE),
    ],
    ids=["fewer drafts", "k is not 0", "no time", "another class"],
)
def test_a_window_spoils_its_group(place: int, window: Any, reason: LeftOut) -> None:
    groups = Groups(drafts_kind(MOST))
    add_group(groups, 0, 2, 14.0, **{f"at{place}": window})
    add_group(groups, 1, 2, 14.0)
    assert groups.left_out == {reason: 1}
    assert groups.groups == {("2", 2): 1, (ALL, 2): 1}


def spans_of(windows: Sequence[Any]) -> DraftTokens:
    tokens = DraftTokens()
    for each in [*windows, verified(0)]:
        tokens.add(each)
    return tokens


def test_tokens_count_from_the_fifth_window_at_one_k() -> None:
    """The first four accept 4 of 4, the others 1 and 3; a run of four gives no span."""
    behind = [verified(2, accepted=4)] * UNSETTLED
    tokens = spans_of([*behind, verified(1), *behind, verified(2, 1), verified(2, 3), verified(0)])
    found = {name: list(own) for name, own in tokens.spans.items()}
    assert found == {("2", 2): [(4, 4)], (ALL, 2): [(4, 4)]}
    assert tokens.windows == {2: 10, 1: 1, 0: 2}


def test_tokens_that_nobody_got_do_not_count() -> None:
    behind = [verified(2, accepted=4, undelivered_tokens=9)] * UNSETTLED
    tokens = spans_of([*behind, verified(2, 4), verified(2, 3, undelivered_tokens=2), verified(2)])
    assert list(tokens.spans[ALL, 2]) == [(5, 6)]


def test_windows_of_several_counts_are_left_out_and_do_not_end_a_span() -> None:
    mixed = window(2, draft_tokens=3, accepted_tokens=3)
    tokens = spans_of([*[verified(2, 4)] * UNSETTLED, verified(2, 1), mixed, verified(2, 1)])
    assert list(tokens.spans[ALL, 2]) == [(2, 4)]
    assert sum(tokens.windows.values()) == 7


def test_a_span_over_two_classes_counts_for_each() -> None:
    behind = [verified(1)] * UNSETTLED
    tokens = spans_of([*behind, verified(1, 2), verified(1, 5, requests=7)])
    found = {name: list(own) for name, own in tokens.spans.items()}
    assert found == {("2", 1): [(2, 2)], ("5-8", 1): [(5, 7)], (ALL, 1): [(7, 9)]}


def test_memory_is_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_groups, "KEPT", 16)
    groups, tokens = Groups(drafts_kind(MOST)), DraftTokens()
    for number in range(100):
        add_group(groups, number, 1, 12.0 if number >= 84 else 30.0)
        for at in range(UNSETTLED + 1):
            tokens.add(verified(1, accepted=int(number >= 84 and at == UNSETTLED)))
        tokens.add(verified(0))
    assert {len(own) for own in groups.effects.values()} == {16}
    assert all(effect == pytest.approx(log(1.2)) for effect in groups.effects[ALL, 1])
    assert list(tokens.spans["2", 1]) == [(1, 2)] * 16
    assert tokens.number == {("2", 1): 100, (ALL, 1): 100}


LABELS = labels_of("a + b", "off", "off", 0)


class Shown:
    """A publisher, and what a scrape of its folder shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups, self.tokens = Groups(drafts_kind(MOST)), DraftTokens()
        files = MetricFiles(folder, "nwor-0-1-live")
        files.set("nwor_drafts_info", (*LABELS, ("method", "eagle3"), ("model", "a/b")), 1)
        self.publisher = LivePublisher(self.groups, files, LABELS, tokens=self.tokens)

    def read(self) -> Reading:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))  # type: ignore[no-untyped-call]
        reading = reading_of(generate_latest(registry).decode(), "http://h/metrics")
        return reading


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_before_the_first_group_every_count_stands_at_0(shown: Shown) -> None:
    shown.publisher.publish()
    reading = shown.read()
    assert reading.windows == {0: 0, 1: 0, 2: 0}
    assert reading.cells == [1, 2]
    assert (reading.groups(ALL), reading.half_width(ALL), reading.clock) == (0, None, None)
    assert (reading.pair.method, reading.pair.draft) == ("eagle3", "a/b")
    assert reading.worth().rates == ()


def assert_same(found: Interval, truth: Interval | None) -> None:
    assert truth is not None
    assert found.value == pytest.approx(truth.value)
    assert found.error == pytest.approx(truth.error)
    assert (found.degrees, found.count) == (truth.degrees, truth.count)


def test_estimates_come_back_from_the_metrics(shown: Shown) -> None:
    draw = random.Random(3)
    for number in range(60):
        for cell, ms in ((1, 12.0), (2, 14.0), (AGAIN, 10.0)):
            add_group(shown.groups, number, cell, ms * exp(draw.gauss(0, 0.05)), requests=7)
        for k in (1, 2):
            for _ in range(UNSETTLED + 6):
                shown.tokens.add(verified(k, draw.randrange(7 * k + 1), requests=7))
    shown.tokens.add(verified(0))
    shown.publisher.publish()
    reading = shown.read()
    own = reading._at_size("5-8")
    for k in (1, 2):
        assert_same(own.times[k], robust_location(list(shown.groups.effects["5-8", k])))
        accepted, windows = zip(*shown.tokens.spans["5-8", k], strict=True)
        assert_same(own.tokens.logs[k], log_tokens(accepted, windows))
    assert (reading.groups("5-8"), reading.clock) == (60, "host")
    worth = reading.worth()
    assert {rate.groups for rate in worth.rates} == {60}
    assert [worth.sizes(rate.requests) for rate in worth.rates] == ["5-8", "5-8"]
    for rate in worth.rates:
        assert rate.ratio == pytest.approx((rate.tokens or 0) / (rate.time_ratio or 1))
    assert set(worth.noise) == {8}


def test_every_metric_is_told_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for metric in (*DRAFT_METRICS, *LIVE_METRICS):
        assert f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}" in page


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
