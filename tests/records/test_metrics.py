"""Metrics as Prometheus reads them: names, types, labels, sums; read with the client's parser."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families
from toy_run import Runner

from nwor_bench.records.metrics import KNOWN_REASONS, METRICS, MetricFiles, WindowMetrics, labels_of
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, WindowRecord, columns
from nwor_bench.report.evidence import MEANINGS

DESIGNED = {
    *("nwor_total_staged", "nwor_total_committed", "nwor_total_rejected", "nwor_acceptance_rate"),
    *("nwor_fallback_count", "nwor_unique_tokens", "nwor_stage_operations"),
    *("scv_graph_hits", "scv_graph_captures", "scv_fallback_count"),
}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: str) -> Samples:
    """Every sample by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    found = [
        v for (n, at), v in samples.items() if n == name and labels.items() <= dict(at).items()
    ]
    assert found, name
    return sum(found)


def exposed(folder: Path) -> str:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return generate_latest(registry).decode()


def counted(folder: Path) -> tuple[RunData, str]:
    """A run on a fake engine, and the metrics of its windows."""
    run = Runner(folder / "run", FakeEngine(), batches=2).run()
    metrics_folder = folder / "metrics"
    metrics_folder.mkdir()
    files = MetricFiles(metrics_folder, "nwor-0-1")
    metrics = WindowMetrics(files)
    for each in run.windows:
        labels = labels_of(each.pair, each.nwor_mode, each.scv_mode, rank=0)
        metrics.begin(labels)
        metrics.add(each, labels)
    text = exposed(metrics_folder)
    files.close()
    return run, text


def test_names_are_those_of_the_design_and_of_cells_csv() -> None:
    """Every reason that a report explains is among those that are 0 from the start."""
    names = {metric.name for metric in METRICS}
    assert names >= DESIGNED
    in_csv = set(columns(CellResult)) | {"acceptance_rate"}
    for name in names:
        assert name in in_csv or name.removeprefix("nwor_") in in_csv
    assert set(MEANINGS) <= {reason for reasons in KNOWN_REASONS.values() for reason in reasons}


@pytest.mark.slow
def test_metrics_are_the_sums_of_a_runs_records(tmp_path: Path) -> None:
    run, text = counted(tmp_path)
    families = list(text_string_to_metric_families(text))
    assert {family.name: family.type for family in families} == {m.name: m.kind for m in METRICS}
    for family in families:
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if family.type == "counter" else "")
            by_reason = {"reason"} if family.name.endswith("fallback_count") else set()
            assert set(sample.labels) == {"pair", "nwor_mode", "scv_mode", "rank"} | by_reason
    samples = parse(text)
    assert sum(window.staged_tokens for window in run.windows) > 0
    for modes in {(window.nwor_mode, window.scv_mode) for window in run.windows}:
        windows = [w for w in run.windows if (w.nwor_mode, w.scv_mode) == modes]
        labels = {"pair": "toy", "nwor_mode": modes[0], "scv_mode": modes[1], "rank": "0"}
        summed = {
            "nwor_draft_tokens_total": "draft_tokens",
            "nwor_total_staged_total": "staged_tokens",
            "nwor_total_committed_total": "committed_tokens",
            "nwor_total_rejected_total": "rejected_tokens",
            "nwor_stage_operations_total": "stage_operations",
        }
        sums = {
            **{n: sum(getattr(w, field) for w in windows) for n, field in summed.items()},
            "nwor_windows_total": len(windows),
            "nwor_unique_tokens": windows[-1].staged_tokens,
        }
        assert {name: total(samples, name, **labels) for name in sums} == sums
        rate = sum(w.accepted_tokens for w in windows) / sums["nwor_draft_tokens_total"]
        assert total(samples, "nwor_acceptance_rate", **labels) == pytest.approx(rate, rel=1e-12)
        reasons = Counter(w.scv_fallback_reason for w in windows if w.scv_fallback_reason)
        for reason, count in reasons.items():
            found = total(samples, "scv_fallback_count_total", reason=reason, **labels)
            assert found == count


def window(staged: int = 0, accepted: int = 0, **reasons: Any) -> WindowRecord:
    """A window of four drafts in three layers."""
    return WindowRecord(
        num_reqs=1,
        draft_tokens=4,
        accepted_tokens=accepted,
        staged_tokens=staged,
        committed_tokens=min(accepted, staged),
        rejected_tokens=staged - min(accepted, staged),
        stage_operations=3 * staged,
        **{"fallback_reason": None, **reasons},
    )


def test_workers_are_merged_and_labelled_by_rank(tmp_path: Path) -> None:
    odd = 'odd "reason"\\\n'
    recorded = {
        0: [window(4, 1, scv_path="capture"), window(4, 3, scv_path="graph")],
        1: [window(fallback_reason=odd), window(fallback_reason=odd, scv_path="graph"),
            window(4, 4, scv_fallback_reason="no_cuda")],
        2: [],
    }  # fmt: skip
    files = [MetricFiles(tmp_path, f"nwor-{rank}-1") for rank in recorded]
    for rank, windows in recorded.items():
        worker, labels = WindowMetrics(files[rank]), labels_of("a pair", "stage", "graph", rank)
        worker.begin(labels)
        for each in windows:
            worker.add(each, labels)
    samples = parse(exposed(tmp_path))
    at = {"pair": "a pair", "nwor_mode": "stage", "scv_mode": "graph"}
    for name, expected in {
        "nwor_windows_total": (2, 3, 0),
        "nwor_total_staged_total": (8, 4, 0),
        "scv_graph_hits_total": (1, 1, 0),
        "scv_graph_captures_total": (1, 0, 0),
        "nwor_fallback_count_total": (0, 2, 0),
        "scv_fallback_count_total": (0, 1, 0),
    }.items():
        found = tuple(total(samples, name, rank=str(rank), **at) for rank in range(3))
        assert (name, found) == (name, expected)
    assert total(samples, "nwor_fallback_count_total", rank="1", reason=odd) == 2
    assert total(samples, "nwor_unique_tokens", rank="0") == 4
    # Rank 2 drafted nothing, so there is no rate: no sample, not 0.
    rated = {dict(k)["rank"] for n, k in samples if n == "nwor_acceptance_rate"}
    assert rated == {"0", "1"}
    for file in files:
        file.close()


FALLBACKS = ("nwor_fallback_count_total", "scv_fallback_count_total")


@pytest.mark.parametrize("name", FALLBACKS)
def test_fallbacks_are_at_0_before_the_first(tmp_path: Path, name: str) -> None:
    """`increase()` sees a first fallback only where the series stood at 0 in a scrape before."""
    files = MetricFiles(tmp_path, "nwor-0-1")
    metrics, labels = WindowMetrics(files), labels_of("a pair", "stage", "graph", 0)
    metrics.begin(labels)
    before = parse(exposed(tmp_path))
    assert total(before, name, **dict(labels)) == 0
    known = {dict(at)["reason"] for (n, at) in before if n == name}
    assert known
    for reason in (*sorted(known), "not_known_yet"):
        reasons = [reason if n == name else None for n in FALLBACKS]
        reason_of = {"fallback_reason": reasons[0], "scv_fallback_reason": reasons[1]}
        metrics.add(window(**reason_of), labels)
    after = parse(exposed(tmp_path))
    assert total(after, name) == len(known) + 1
    assert {v for (n, at), v in after.items() if n == name} == {1.0}
    files.close()


DASHBOARD = Path(__file__).resolve().parents[2] / "sweeps" / "grafana-dashboard.json"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    """Every series and every label of its queries is one that is exposed."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    exposed = {m.name + ("_total" if m.kind == "counter" else "") for m in METRICS}
    asked = {name for query in queries for name in re.findall(r"\b(?:nwor|scv)_\w+(?=\{)", query)}
    assert asked <= exposed
    assert exposed - asked <= {"nwor_acceptance_rate"}  # made from the counters, for any interval
    labels = {name for query in queries for name in re.findall(r"(\w+)=~?\"", query)}
    grouped = {name for query in queries for by in re.findall(r"by \(([^)]*)\)", query)
               for name in by.split(", ")}  # fmt: skip
    assert labels | grouped == {"pair", "rank", "nwor_mode", "scv_mode", "reason"}
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len({p["id"] for p in panels}) == len(panels)
