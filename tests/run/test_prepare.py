"""A whole session on a stand-in engine: however it ends, what was measured is reported."""

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from fake_engine import FakeEngine, FakeFactory, events_but_gates
from refusals import refused
from tiny_session import begin, spec_of

from nwor_bench.errors import ConfigError, EngineError, ExitCode
from nwor_bench.models.pairs import ResolvedPair
from nwor_bench.records.store import RunData, read_run
from nwor_bench.run.execute import GroupEngine, Prepared, heed_interrupts
from nwor_bench.run.prepare import PairChoice, run_one
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.config import RunSpec, load_scenario, resolve

REPORTS = ("run.json", "cells.csv", "batches.csv", "windows.csv", "report.md", "report.html")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_surroundings")]
GATE_ENDS = 1 + 8  # one warm-up, six cells, the A/A arm, and one of them without instruments


def reported(folder: Path = Path("run")) -> tuple[RunData, pd.DataFrame]:
    """The run's records, once every report is seen to hold all of them."""
    run = read_run(folder)
    assert [name for name in REPORTS if not (folder / name).is_file()] == []
    assert len(pd.read_csv(folder / "batches.csv")) == len(run.batches)
    assert len(pd.read_csv(folder / "windows.csv")) == len(run.windows)
    assert run.header.finished_at is not None
    return run, pd.read_csv(folder / "cells.csv", keep_default_na=False)


def test_a_sound_session(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/nwor-bench", "sweep", "--output", "my run"])
    engine = FakeEngine()
    assert begin(engine, seed=9) is ExitCode.OK
    run, cells = reported()
    assert run.header.status == "complete"
    assert len(run.batches) == GATE_ENDS + 2 * 7
    assert list(cells["parity"]) == ["reference"] + ["exact"] * 6
    assert list(cells["arm"]) == ["", "A/A"] + [""] * 5
    assert run.header.engine.start_count == 1
    assert run.header.parity.broken == {}
    assert run.header.measuring_s >= 0
    assert engine.closed == 1
    ids = engine.calls[0].prompts
    assert len(ids) == 2
    assert all(len(prompt) > 10 and max(prompt) < 264 for prompt in ids)
    text = capsys.readouterr().out
    assert "gate: 3 of 5 cells acted" in text
    assert "Report: run/report.html" in text
    whole = ("Report: ", "gate: INEFFECTIVE")  # a log has each step in one line
    assert max(len(line) for line in text.splitlines() if not line.startswith(whole)) <= 100
    header = json.loads(Path("run/run.json").read_text())
    assert (header["pair"]["name"], header["spec"]["seed"]) == ("tiny", 9)
    assert header["scenario"]["requests"] == 2
    assert header["command"] == "nwor-bench sweep --output 'my run'"
    assert header["environment"]["python"]
    assert [block["block"] for block in header["blocks"]] == [0, 1, 2]


def test_a_run_goes_into_runs_by_default() -> None:
    begin(FakeEngine(), output=None)
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-short-tiny")
    reported(folder)


@pytest.mark.parametrize("n", [0, 1, 5, GATE_ENDS, 12])
def test_an_interruption_keeps_what_was_measured(
    n: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(failing={n: KeyboardInterrupt()})
    assert begin(engine) is ExitCode.INTERRUPTED
    run, _ = reported()
    assert run.header.status == "partial"
    assert len(run.batches) == n
    assert [event["event"] for event in events_but_gates(run)] == ["interrupted"]
    assert engine.closed == 1
    out = capsys.readouterr().out
    assert "interrupted: keeping what was measured" in out
    assert "To go on: nwor-bench sweep --resume " in out


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_that_a_library_loses_ends_the_run_behind_the_batch(
    which: signal.Signals,
) -> None:
    """Seen while an engine started: the exception met a finaliser, and the sweep went on."""
    before = signal.getsignal(which)

    def lose(number: int) -> None:
        if number == 9:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(which)

    assert begin(FakeEngine(before=lose)) is ExitCode.INTERRUPTED
    run, _ = reported()
    assert (run.header.status, len(run.batches)) == ("partial", 10)
    assert signal.getsignal(which) is before


def test_an_interruption_that_the_start_of_the_engine_loses_ends_the_run() -> None:
    engine = FakeEngine()

    def start(*_: Any) -> FakeEngine:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return engine

    assert begin(start) is ExitCode.INTERRUPTED
    run, _ = reported()
    assert (run.header.status, len(run.batches), engine.closed) == ("partial", 0, 1)


def test_ctrl_c_is_ignored_if_the_process_was_started_to_ignore_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with heed_interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
        assert not interrupts.seen
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interruption_of_a_broken_run_still_says_3() -> None:
    engine = FakeEngine(
        wrong=lambda number, cell: cell.label == "stage x off", failing={12: KeyboardInterrupt()}
    )
    assert begin(engine) is ExitCode.CORRECTNESS_BROKEN
    assert reported()[0].header.status == "partial"


@pytest.mark.parametrize(
    "error", [EngineError("the engine died"), RuntimeError("the engine died"), MemoryError()]
)
def test_an_error_is_raised_after_the_reports_are_written(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(failing={10: error})
    with pytest.raises(EngineError) as caught:
        begin(engine)
    known = isinstance(error, EngineError)
    assert error is (caught.value if known else caught.value.__cause__)
    assert known or str(caught.value) == f"{type(error).__name__}: {error}"
    run, cells = reported()
    assert run.header.status == "failed"
    assert len(run.batches) == 10
    assert len(cells) == 7
    (event,) = events_but_gates(run)
    assert event["event"] == "failed"
    assert event["error"] in ("the engine died", "MemoryError()")
    assert event["error"] in Path("run/report.md").read_text()
    assert engine.closed == 1
    log = Path("run/engine.log")
    assert f"failed; traceback: {log}" in capsys.readouterr().out
    told = log.read_text(encoding="utf-8")
    assert told.startswith("Traceback")
    assert "fake_engine.py" in told
    assert told.splitlines()[-1].endswith(f"{type(error).__name__}: {error}".removesuffix(": "))


def test_an_engine_that_does_not_start_leaves_a_failed_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(pair: ResolvedPair, spec: RunSpec, log: Path | None) -> FakeEngine:
        raise EngineError.at("vLLM did not start", "no luck")

    with refused("vLLM did not start", EngineError):
        begin(broken)
    run, cells = reported()
    assert (run.header.status, len(run.batches), len(cells)) == ("failed", 0, 0)
    out = capsys.readouterr().out
    assert out.endswith("Report: run/report.html\nTo go on: nwor-bench sweep --resume run\n")
    assert "no luck" not in out  # the command prints it last
    page = Path("run/report.md").read_text()
    assert "**FAILED: vLLM did not start: no luck**" in page
    for table in (out, page):
        assert "Verdict" not in table


def test_what_vllm_refuses_leaves_no_run_folder() -> None:
    def refuse(pair: ResolvedPair, spec: RunSpec) -> None:
        raise ConfigError.at("vLLM refuses this configuration", "no")

    factory = FakeFactory()
    with refused("vLLM refuses this configuration"):
        begin(factory, check=refuse)
    assert factory.starts == 0
    assert not Path("run").exists()


def test_a_dry_run_starts_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("something was started")

    code = run_one(
        spec_of(batches=3, seed=2),
        PairChoice(pair="tiny"),
        RunOptions(dry_run=True),
        engine_factory=refuse,
        check_engine=refuse,
    )
    assert code is ExitCode.OK
    assert list(Path.cwd().iterdir()) == []
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    grid = [(n, s) for n in ("off", "stage") for s in ("off", "graph", "adaptive")]
    labels = [*(f"  {nwor} x {scv}" for nwor, scv in grid), "  off x off (A/A)"]
    assert lines[-len(labels) :] == labels


@pytest.mark.parametrize(
    ("choice", "config", "expected"),
    [
        (PairChoice("tiny"), None, PairChoice("tiny")),
        (PairChoice("tiny"), {"prompt_lookup_max": 2}, PairChoice("tiny")),
        (PairChoice("tiny"), {"method": "ngram"}, PairChoice("tiny", method="ngram")),
        (PairChoice(), {"model": "a/b"}, PairChoice(draft_model="a/b")),
        (
            PairChoice(method="eagle", draft_model="a/b"),
            {"method": "eagle", "model": "a/b"},
            PairChoice(method="eagle", draft_model="a/b"),
        ),
    ],
)
def test_vllms_speculative_config_chooses_method_and_drafter(
    choice: PairChoice, config: dict[str, Any] | None, expected: PairChoice
) -> None:
    assert choice.with_config(config) == expected


@pytest.mark.parametrize(("flags", "dtype"), [({}, "float32"), ({"dtype": "bfloat16"}, None)])
def test_float32_if_the_processor_has_no_bf16_and_the_user_names_none(
    flags: dict[str, str],
    dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nwor_bench.engine.preflight.float32_reason", lambda dtype: f"not {dtype}")
    begin(FakeEngine(), **flags)
    header = read_run(Path("run")).header
    assert header.spec.dtype == flags.get("dtype")
    assert (header.dtype_note is None) is (dtype is None)
    if dtype is not None:
        assert header.pair.dtype == dtype
        assert str(header.dtype_note) in capsys.readouterr().out


@pytest.mark.parametrize(("gpu", "cell"), [(True, "stage x graph"), (False, "stage x off")])
def test_an_engine_with_one_state_slot_stages_without_scv_on_a_cpu(gpu: bool, cell: str) -> None:
    """SCV never fires there, so its cell would be INEFFECTIVE."""
    spec = resolve(load_scenario("short"), against='{"additional_config": {"nwor_state_slots": 1}}')
    completed = spec.experiment.completed(spec, on_gpu=gpu)
    labels = [each.label for each in completed.experiment.cells("toy")]
    assert [label for label in labels if label.startswith(cell)] == [labels[1]]


def test_runs_of_one_engine_have_its_logs(tmp_path: Path) -> None:
    """A file of its own that an earlier try left is kept."""
    logs = [tmp_path / name / "engine.log" for name in ("01", "02", "03")]

    def started(pair: object, spec: object, log: Path | None) -> FakeEngine:
        assert log is not None
        for name in ("engine.log", "engine-1.log"):
            (log.parent / name).write_text(f"{name} of {log.parent.name}")
        return FakeEngine()

    group = GroupEngine(started, cast(RunSpec, None))
    for log in logs:
        log.parent.mkdir()
    logs[2].write_text("own")
    for log in logs:
        with group.source(cast(Prepared, SimpleNamespace(pair=None)))(log):
            pass
    assert [log.read_text() for log in logs] == ["engine.log of 01"] * 2 + ["own"]
    assert (logs[2].parent / "engine-1.log").read_text() == "engine-1.log of 01"
