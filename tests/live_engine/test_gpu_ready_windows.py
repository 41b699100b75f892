"""The gate on windows that are ready: it takes the path that is timed, and sees a fault there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tools import GRAPHS, prompts_of, tiny_spec, worker_of
from planted_gate import GateOutcome, run_gate

from nwor_bench.engine.engine import VllmEngine
from nwor_bench.models.pairs import resolve_pair
from nwor_bench.records.store import read_run
from nwor_bench.workload.config import RunSpec

pytestmark = [pytest.mark.engine, pytest.mark.gpu]

ADAPTIVE = "stage x adaptive"
PROMPTS = prompts_of([400, 131, 90, 233, 61, 350, 140, 77], seed=1)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, RunSpec]]:
    folder = tmp_path_factory.mktemp("ready")
    spec = tiny_spec(draft_tokens=4, max_model_len=1024, engine_args=json.dumps(GRAPHS["full"]))
    pair = resolve_pair("llama-3b-shape", cache_dir=folder)
    engine = VllmEngine(pair, spec, folder / "engine.log")
    try:
        yield engine, spec
    finally:
        engine.close()


@pytest.fixture(params=[False, True], ids=["whole", "interleaved"])
def gate(
    request: pytest.FixtureRequest, started: tuple[VllmEngine, RunSpec], tmp_path: Path
) -> Any:
    """Runs the gate of stage x adaptive; its outcome, and the commits of each batch's windows."""

    def run() -> tuple[GateOutcome, list[set[str]]]:
        folder = tmp_path / "run"
        engine, spec = started
        cells = ("off x off", ADAPTIVE)
        outcome = run_gate(engine, spec, PROMPTS, folder, cells=cells, interleaved=request.param)
        paths: dict[int, set[str]] = {}
        for window in read_run(folder).windows:
            if window.path is not None:
                paths.setdefault(window.batch, set()).add(window.path.rpartition(", ")[2])
        return outcome, [paths[batch] for batch in sorted(paths)]

    return run


def test_only_the_last_batch_has_ready_windows(gate: Any) -> None:
    outcome, commits = gate()
    assert outcome.reasons == {}
    assert all("ready" not in each for each in commits[:-1])
    assert "joined" in commits[0]
    assert "ready" in commits[-1]


def test_a_row_that_only_ready_windows_lose_is_seen(
    gate: Any, monkeypatch: pytest.MonkeyPatch, started: tuple[VllmEngine, RunSpec]
) -> None:
    from nwor_bench.plugin.runner_v2.stock_update import ReadyWindow

    cache = worker_of(started[0]).nwor_hook.buffers.layers[-1].kv_cache
    original = ReadyWindow.commit

    def commit(window: ReadyWindow, call: Any) -> str:
        problem = original(window, call)
        slot = window.batch.slots.view(-1)[0]  # of the first request's certain token
        cache[slot // cache.shape[2], :, slot % cache.shape[2]] = 0
        return problem

    monkeypatch.setattr(ReadyWindow, "commit", commit)
    outcome, _ = gate()
    assert set(outcome.caught) == {ADAPTIVE}
    assert outcome.caught[ADAPTIVE] == {"last batch"}
    assert "K/V" in str(outcome.reasons)
