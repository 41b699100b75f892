"""What a worker's groups become on /metrics."""

import time
from pathlib import Path

import pytest
from live_windows import timed, turns_of_group
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from nwor_bench.plugin import live_ratio
from nwor_bench.plugin.interleaving import LiveTurns
from nwor_bench.plugin.live_ratio import LiveGroups, Publisher
from nwor_bench.records.fallback_reasons import Guard
from nwor_bench.records.metrics import LIVE_METRICS, MetricFiles, labels_of
from nwor_bench.records.types import ScvMode

LABELS = labels_of("a + b", "interleave", "graph", 0)


class Shown:
    """A publisher, and what a scrape of its folder shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = LiveGroups()
        self.turns = LiveTurns(None, ScvMode.GRAPH)  # type: ignore[arg-type]
        files = MetricFiles(folder, "nwor-0-1-live")
        self.publisher = Publisher(self.groups, self.turns, files, LABELS)

    def add(self, number: int, stage_ms: float = 9.7, requests: int = 2) -> None:
        for group in range(number):
            for turn in turns_of_group(group):
                ms = stage_ms * (1 + 0.001 * (group % 5 - 2)) if turn.cell else 10.0
                self.groups.add(timed(ms, num_reqs=requests), turn)

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


def test_off_against_itself_has_metrics_of_its_own(shown: Shown) -> None:
    shown.add(20)
    for group in range(30):
        for turn in turns_of_group(group, order=(0, 2, 2, 0)):
            shown.groups.add(timed(10.1 if turn.cell else 10.0), turn)
    shown.publisher.publish()
    found = shown.scrape()
    assert found["nwor_live_aa_ratio", "all"] == pytest.approx(1.01)
    assert found["nwor_live_aa_ratio_low", "all"] <= found["nwor_live_aa_ratio_high", "all"]
    assert found["nwor_live_aa_groups_total", "all"] == 30
    assert found["nwor_live_groups_total", "all"] == 20
    assert found["nwor_live_ratio", "all"] == pytest.approx(0.97, rel=1e-3)


def test_counters_grow_and_the_ratio_moves(shown: Shown) -> None:
    shown.add(20)
    shown.publisher.publish()
    shown.publisher.publish()
    assert shown.scrape()["nwor_live_groups_total", "all"] == 20
    before = shown.scrape()["nwor_live_ratio", "all"]
    shown.add(60, stage_ms=8.0)
    shown.groups.add(timed(1.0), turns_of_group(98)[0])
    shown.groups.add(timed(1.0), turns_of_group(99)[0])
    shown.publisher.publish()
    found = shown.scrape()
    assert found["nwor_live_groups_total", "all"] == 80
    assert found["nwor_live_ratio", "all"] < before
    assert found["nwor_live_groups_left_out_total", "interrupted"] == 1


def test_a_guard_shows_as_1(shown: Shown) -> None:
    shown.publisher.publish()
    shown.turns.stopped = Guard.RANKS_DIFFER
    shown.publisher.publish()
    shown.publisher.publish()
    found = shown.scrape()
    assert found["nwor_live_staging_stopped_total", "ranks_differ"] == 1
    assert found["nwor_live_staging_stopped_total", "commit_refused"] == 0


def test_it_publishes_by_itself(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_ratio, "EVERY_S", 0.01)
    shown.publisher.start()
    shown.add(12)
    deadline = time.monotonic() + 30
    while ("nwor_live_ratio", "all") not in shown.scrape():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shown.publisher.stop()


def test_every_metric_is_told_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    for metric in LIVE_METRICS:
        assert f"`{metric.name}{'_total' if metric.kind == 'counter' else ''}" in page
