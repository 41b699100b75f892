"""Where a worker's metrics go, when they are off, and what counts there."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_windows import counts_of
from prometheus_client import REGISTRY, generate_latest
from refusals import refused

from nwor_bench.plugin.observe import metrics
from nwor_bench.plugin.observe.metrics import (
    FOLDER,
    SWITCH,
    VLLM_FOLDER,
    folder_of,
    pair_name,
    publish,
    share_folder,
)
from nwor_bench.plugin.settings import PluginSettings
from nwor_bench.plugin.step import Accumulator
from nwor_bench.records.types import NworMode, ScvMode


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder yet, and none left in the process's registry."""
    for name in (SWITCH, FOLDER, VLLM_FOLDER):
        # Set before it is deleted, so that what the plugin sets itself is undone too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
    if metrics._own_folder is not None:
        metrics._own_folder.cleanup()
        metrics._own_folder = None


def config_of(target: str, draft: str | None, **speculation: Any) -> Any:
    drafter = {"model": draft or "x", "uses_draft_kv_cache": lambda: draft is not None}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=1, world_size=2),
        speculative_config=SimpleNamespace(**drafter, **speculation),
        model_config=SimpleNamespace(model=target),
    )


def published() -> Accumulator:
    """The windows of rank 1 of a server's second engine."""
    hook: Any = SimpleNamespace(
        nwor_mode=NworMode.STAGE,
        validator=SimpleNamespace(mode=ScvMode.GRAPH),
        accumulator=Accumulator(),
    )
    config = config_of("org/target", "/models/draft", method="draft_model")
    settings = PluginSettings(NworMode.STAGE, ScvMode.GRAPH, debug=False)
    publish(hook, SimpleNamespace(rank=1, vllm_config=config), settings)
    return hook.accumulator


def nwor_lines() -> list[str]:
    text = generate_latest(REGISTRY).decode()
    return [line for line in text.splitlines() if line.startswith(("nwor_", "scv_"))]


def test_a_server_shows_what_its_workers_count() -> None:
    share_folder()
    windows = published()
    at = 'nwor_mode="stage",pair="org/target + draft",rank="3",scv_mode="graph"'
    reasoned = at.replace('rank="3"', 'rank="3",reason="micro_batches"')
    begun = nwor_lines()
    assert f"nwor_windows_total{{{at}}} 0.0" in begun
    assert f"nwor_fallback_count_total{{{reasoned}}} 0.0" in begun
    assert not any(line.startswith("nwor_acceptance_rate") for line in begun)
    windows.add(counts_of(1, draft_tokens=0, staged_tokens=0))  # k = 0, if draft counts alternate
    assert nwor_lines() == begun
    windows.add(counts_of(1, scv_path="graph"))  # of 4 drafts 1 is accepted
    assert {
        f"nwor_total_staged_total{{{at}}} 4.0",
        f"nwor_total_rejected_total{{{at}}} 3.0",
        f"scv_graph_hits_total{{{at}}} 1.0",
        f"nwor_acceptance_rate{{{at}}} 0.25",
    } <= set(nwor_lines())


def test_the_folder_is_made_once_and_left_to_the_processes_to_come() -> None:
    share_folder()
    folder = os.environ[FOLDER]
    assert Path(folder).is_dir()
    share_folder()
    assert os.environ[FOLDER] == folder
    assert folder_of() == Path(folder)


def test_a_sweep_switches_them_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(SWITCH, "0")
    share_folder()
    assert metrics._own_folder is None
    monkeypatch.setenv(VLLM_FOLDER, str(tmp_path))
    assert published().listeners == []
    assert list(tmp_path.iterdir()) == []


def test_vllms_own_folder_comes_first(tmp_path: Path) -> None:
    gone = str(tmp_path / "other")
    assert folder_of({VLLM_FOLDER: str(tmp_path), FOLDER: gone}) == tmp_path
    assert folder_of({}) is None
    with refused(FOLDER, value=gone):
        folder_of({FOLDER: gone})


def test_a_pairs_name() -> None:
    config = config_of("/data/models/target", None, method="ngram")
    assert pair_name(config) == "target + ngram"
