"""Groups of a server's windows: planted effects, what is left out, bounded memory, and /metrics."""

import random
import threading
import time
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from live_windows import timed
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.plugin import live
from nwor_bench.plugin.live import LivePublisher
from nwor_bench.plugin.live_groups import MODES, Clock, Groups, Kind
from nwor_bench.records.fallback_reasons import LeftOut
from nwor_bench.records.metrics import LIVE_METRICS, MetricFiles, labels_of
from nwor_bench.records.window_order import ALL, places_of_group
from nwor_bench.stats.robust import robust_location

OFF_MS, STAGE_MS = 10.0, 9.7


def add_group(groups: Groups, number: int, **changes: Any) -> None:
    """One whole group; `changes` are by the window's place in it: a window each."""
    for number_of, place in enumerate(places_of_group((0, 1), number, 2)):
        ms = STAGE_MS if place.cell else OFF_MS
        # What follows a switch is slow and must not count.
        window = timed(50.0 if place.position == 0 else ms)
        groups.add(changes.get(f"at{number_of}", window), place)


def test_a_group_compares_the_windows_behind_the_first_of_each_run() -> None:
    groups = Groups(MODES)
    add_group(groups, 0)
    assert groups.groups == {("2", 1): 1, (ALL, 1): 1}
    assert groups.left_out == {}
    assert groups.clock is Clock.HOST
    assert [exp(effect) for effect in groups.effects["2", 1]] == [pytest.approx(0.97)]
    assert groups.effects[ALL, 1] == groups.effects["2", 1]


@pytest.mark.parametrize(
    ("place", "window", "reason"),
    [
        (1, timed(None), LeftOut.UNTIMED),
        (3, timed(10.0, device=9.0), LeftOut.UNTIMED),
        (5, timed(9.7, fallback_reason="kv_transfer"), LeftOut.FALLBACK),
        (7, timed(10.0, num_reqs=3), LeftOut.BATCH_SIZE),
    ],
    ids=["no time", "another clock", "fell back", "another class"],
)
def test_a_window_spoils_its_group(place: int, window: Any, reason: LeftOut) -> None:
    groups = Groups(MODES)
    add_group(groups, 0, **{f"at{place}": window})
    add_group(groups, 1)
    assert groups.left_out == {reason: 1}
    assert groups.groups == {("2", 1): 1, (ALL, 1): 1}


@pytest.mark.parametrize("given_places", range(1, 8))
def test_a_group_cut_short_is_left_out_and_spoils_no_other(given_places: int) -> None:
    groups = Groups(MODES)
    for place in places_of_group((0, 1), 0, 2)[:given_places]:
        groups.add(timed(1.0 + place.position), place)
    groups.add(timed(77.0), None)  # the prefill
    add_group(groups, 1)
    assert groups.left_out == {LeftOut.INTERRUPTED: 1}
    assert [exp(effect) for effect in groups.effects[ALL, 1]] == [pytest.approx(0.97)]


def test_the_devices_clock_decides_if_there_is_one() -> None:
    groups = Groups(MODES)
    for place in places_of_group((0, 1), 0, 2):
        groups.add(timed(10.0, device=9.0 if place.cell else 10.0), place)
    assert groups.clock is Clock.DEVICE
    assert [exp(effect) for effect in groups.effects[ALL, 1]] == [pytest.approx(0.9)]


def test_memory_is_bounded_and_the_latest_groups_stay() -> None:
    groups = Groups(Kind(kept=16))
    for number in range(100):
        fast = 9.0 if number >= 84 else 5.0
        for place in places_of_group((0, 1), number, 2):
            groups.add(timed(fast if place.cell else 10.0), place)
    for number in range(100, 300):  # groups that are never finished
        groups.add(timed(10.0), places_of_group((0, 1), number, 2)[0])
    assert groups.groups == {("2", 1): 100, (ALL, 1): 100}
    assert {len(effects) for effects in groups.effects.values()} == {16}
    assert all(effect == pytest.approx(log(0.9)) for effect in groups.effects[ALL, 1])
    assert len(groups._members) == 1


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
            groups.add(timed(ms, num_reqs=requests), place)
    assert groups.left_out[LeftOut.INTERRUPTED] == pytest.approx(250, rel=0.2)
    assert set(groups.groups) == {("3-4", 1), ("5-8", 1), (ALL, 1)}
    for effects in groups.effects.values():
        located = robust_location(effects)
        assert located is not None
        ratio = located.exp()
        assert abs(ratio.value - exp(effect)) < 2 * ratio.half_width
        assert ratio.half_width < 0.002


LABELS = labels_of("a + b", "interleave", "graph", 0)


class Shown:
    """A publisher, and what a scrape of its folder shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = Groups(MODES)
        files = MetricFiles(folder, "nwor-0-1-live")
        self.publisher = LivePublisher(self.groups, files, LABELS, stopped=lambda: None)

    def add(self, number: int, stage_ms: float = 9.7, requests: int = 2) -> None:
        for group in range(number):
            for place in places_of_group((0, 1), group, 2):
                ms = stage_ms * (1 + 0.001 * (group % 5 - 2)) if place.cell else 10.0
                self.groups.add(timed(ms, num_reqs=requests), place)

    def scrape(self) -> dict[tuple[str, str], float]:
        """Value by sample's name, and class or reason."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.folder))
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = sample.labels
                assert labels.items() >= dict(LABELS).items()
                found[sample.name, labels.get("num_reqs", labels.get("reason", ""))] = sample.value
        return found


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


def test_counters_stand_at_0_before_the_first_group(shown: Shown) -> None:
    shown.publisher.publish()
    assert shown.scrape() == {
        ("nwor_live_groups_total", "all"): 0,
        ("nwor_live_aa_groups_total", "all"): 0,
        **{
            ("nwor_live_groups_left_out_total", reason): 0
            for reason in ("interrupted", "fallback", "batch_size", "untimed")
        },
        **{
            ("nwor_live_staging_stopped_total", reason): 0
            for reason in ("commit_refused", "counts_do_not_add_up", "ranks_differ")
        },
    }


def test_an_update_that_fails_is_counted_and_tried_again(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown.groups, "kind", Kind(every_s=0.001))
    shown.publisher.start()
    began = shown.scrape()["nwor_live_updated_seconds", ""]
    broken = threading.Event()

    def fail(*_: object) -> None:
        broken.set()
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(live, "robust_location", fail)
        shown.add(50)
        assert broken.wait(10)
    wait_until(lambda: shown.scrape()["nwor_live_updated_seconds", ""] > began)
    shown.add(50)
    wait_until(lambda: ("nwor_live_ratio", ALL) in shown.scrape())
    shown.publisher.stop()
    assert shown.scrape()["nwor_live_failed_updates_total", "OSError"] >= 1


def test_metrics_that_cannot_be_written_grow_old(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the failure can be counted: the thread ends, and its last time stays."""
    shown.publisher.start()
    shown.publisher.stop()
    monkeypatch.setattr(MetricFiles, "add", Mock(side_effect=OSError("no space")))
    shown.add(50)
    before = shown.scrape()
    with pytest.raises(OSError, match="no space"):
        shown.publisher.update()
    assert shown.scrape() == before
    monkeypatch.undo()
    shown.publisher.update()
    assert shown.scrape()["nwor_live_groups_total", ALL] == 50


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_every_class_has_its_ratio_with_an_interval(shown: Shown) -> None:
    shown.add(50)
    shown.add(40, stage_ms=9.0, requests=7)
    shown.add(5, requests=1)  # too few for an interval
    shown.publisher.publish()
    found = shown.scrape()
    for name, ratio, groups in (("2", 0.97, 50), ("5-8", 0.9, 40)):
        assert found["nwor_live_ratio", name] == pytest.approx(ratio, rel=1e-3)
        low, high = found["nwor_live_ratio_low", name], found["nwor_live_ratio_high", name]
        assert low < found["nwor_live_ratio", name] < high
        assert found["nwor_live_groups_total", name] == groups
    assert found["nwor_live_ratio_low", "all"] < found["nwor_live_ratio_high", "all"]
    assert found["nwor_live_groups_total", "all"] == 95
    assert found["nwor_live_groups_total", "1"] == 5
    assert ("nwor_live_ratio", "1") not in found


def test_every_metric_is_told_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for metric in LIVE_METRICS:
        assert f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}" in page
