"""Where a worker's metrics go, when they are off, and how late counts get there in time."""

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


def hook_of(late: Any = None) -> Any:
    return SimpleNamespace(
        nwor_mode=NworMode.STAGE,
        validator=SimpleNamespace(mode=ScvMode.GRAPH),
        accumulator=Accumulator(),
        runner=SimpleNamespace(execute_model=lambda scheduler_output: "stock"),
        late=late,
    )


def worker_of_rank(rank: int, data_parallel_index: int = 0) -> Any:
    parallel = SimpleNamespace(data_parallel_index=data_parallel_index, world_size=2)
    drafter = SimpleNamespace(
        model="/models/draft", method="draft_model", uses_draft_kv_cache=lambda: True
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        speculative_config=drafter,
        model_config=SimpleNamespace(model="org/target"),
    )
    return SimpleNamespace(rank=rank, vllm_config=config)


SETTINGS = PluginSettings(NworMode.STAGE, ScvMode.GRAPH, debug=False)


def nwor_lines() -> list[str]:
    text = generate_latest(REGISTRY).decode()
    return [line for line in text.splitlines() if line.startswith(("nwor_", "scv_"))]


def test_a_server_shows_what_its_workers_count() -> None:
    share_folder()
    hook = hook_of()
    publish(hook, worker_of_rank(1, data_parallel_index=1), SETTINGS)
    at = 'nwor_mode="stage",pair="org/target + draft",rank="3",scv_mode="graph"'
    assert f"nwor_windows_total{{{at}}} 0.0" in nwor_lines()
    reasoned = at.replace('rank="3"', 'rank="3",reason="micro_batches"')
    assert f"nwor_fallback_count_total{{{reasoned}}} 0.0" in nwor_lines()
    assert not any(line.startswith("nwor_acceptance_rate") for line in nwor_lines())
    hook.accumulator.add(counts_of(1, scv_path="graph"))  # of 4 drafts 1 is accepted
    lines = nwor_lines()
    for sample in (
        f"nwor_total_staged_total{{{at}}} 4.0",
        f"nwor_total_rejected_total{{{at}}} 3.0",
        f"scv_graph_hits_total{{{at}}} 1.0",
        f"nwor_acceptance_rate{{{at}}} 0.25",
    ):
        assert sample in lines


def test_windows_without_a_draft_are_no_windows_of_ours() -> None:
    """Windows of k = 0, if draft counts alternate."""
    share_folder()
    hook = hook_of()
    publish(hook, worker_of_rank(0), SETTINGS)
    before = nwor_lines()
    hook.accumulator.add(counts_of(1, draft_tokens=0, staged_tokens=0))
    assert nwor_lines() == before


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
    hook = hook_of()
    publish(hook, worker_of_rank(0), SETTINGS)
    assert hook.accumulator.listeners == []
    assert list(tmp_path.iterdir()) == []


def test_vllms_own_folder_comes_first(tmp_path: Path) -> None:
    both = {VLLM_FOLDER: str(tmp_path), FOLDER: str(tmp_path / "other")}
    assert folder_of(both) == tmp_path
    assert folder_of({}) is None


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with refused(FOLDER, value=str(tmp_path / "gone")):
        folder_of({FOLDER: str(tmp_path / "gone")})


def test_a_pairs_name() -> None:
    ngram = SimpleNamespace(model="x", method="ngram", uses_draft_kv_cache=lambda: False)
    config = SimpleNamespace(
        speculative_config=ngram, model_config=SimpleNamespace(model="/data/models/target")
    )
    assert pair_name(config) == "target + ngram"
