"""Ctrl-C, SIGTERM and kill -9 on a real sweep: it ends soon, what was measured is there, and a
killed run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
from fake_engine import events_but_gates

from nwor_bench.errors import ExitCode
from nwor_bench.records.store import RunData, read_run

pytestmark = pytest.mark.engine

CHECKOUT = Path(__file__).resolve().parents[2]
SWEEP = "sweep --pair tiny --requests 4 --batches 500 --max-new-tokens 40 --output run"
ENDS_WITHIN_S = 30
"""A few seconds of work on a processor of its own; other tests run beside it."""
TIMED = b'"phase":"timed"'
REPORTS = ("cells.csv", "batches.csv", "windows.csv", "report.md", "report.html")

Sweep = subprocess.Popen[str]


Start = Callable[[str], Sweep]


@pytest.fixture
def start(tmp_path: Path, pair_cache: Path) -> Iterator[Start]:
    """Starts command lines in processes of their own, and ends those that still run."""
    environ = {name: v for name, v in os.environ.items() if not name.startswith("NWOR_BENCH_")}
    environ |= {
        "PYTHONPATH": f"{CHECKOUT}:{CHECKOUT / 'kernels'}",
        "NWOR_BENCH_CACHE": str(pair_cache),
    }
    started: list[Sweep] = []

    def begin(arguments: str) -> Sweep:
        command = [sys.executable, "-c", "from nwor_bench.cli.app import main; main()"]
        process = subprocess.Popen(
            [*command, *arguments.split()], cwd=tmp_path, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed_ctrl_c,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def sweep(start: Start) -> Sweep:
    """A sweep that would take minutes."""
    return start(SWEEP)


def heed_ctrl_c() -> None:
    """A shell has its background jobs, and so their children, ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(process: Sweep, happened: Callable[[], bool]) -> None:
    """Two minutes are for a slow machine's first import of vLLM."""
    deadline = time.monotonic() + 120
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"it did not come so far:\n{process.communicate()[0]}")
        time.sleep(0.05)


def stop(process: Sweep, how: signal.Signals, folder: Path) -> tuple[str, RunData]:
    """Send the signal; the output and the run, once everything that must hold does."""
    process.send_signal(how)
    out, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == ExitCode.INTERRUPTED, out
    assert "Traceback" not in out
    assert "interrupted: keeping what was measured" in out
    run = read_run(folder)
    assert run.header.status == "partial"
    assert [event["event"] for event in events_but_gates(run)] == ["interrupted"]
    assert run.warnings == ()
    assert [name for name in REPORTS if not (folder / name).is_file()] == []
    assert len(pd.read_csv(folder / "batches.csv")) == len(run.batches)
    assert json.loads((folder / "run.json").read_text())["finished_at"]
    return out, run


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_measures(sweep: Sweep, tmp_path: Path, how: signal.Signals) -> None:
    folder = tmp_path / "run"
    records = folder / "records.jsonl"
    # Two: the last one may not have reached the disk yet, and goes when its append is cut short.
    wait_until(sweep, lambda: records.is_file() and records.read_bytes().count(TIMED) > 1)
    _, run = stop(sweep, how, folder)
    phases = [batch.phase for batch in run.batches]
    warmup = phases.count("warmup")
    assert phases[: warmup + 9] == ["warmup"] * warmup + ["gate"] * 8 + ["timed"]
    assert len(run.batches) < 3500
    assert {b.parity for b in run.batches if b.phase == "gate"} == {"reference", "exact"}
    assert len(run.windows) == sum(batch.windows for batch in run.batches)
    assert len(pd.read_csv(folder / "cells.csv")) == 7


@pytest.mark.long
def test_stopped_while_the_engine_starts(sweep: Sweep, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = folder / "engine.log"
    wait_until(sweep, lambda: log.is_file() and log.stat().st_size > 0)
    _, run = stop(sweep, signal.SIGINT, folder)
    assert run.batches == ()
    assert not run.header.engine


@pytest.mark.long
def test_killed_and_resumed(start: Start, tmp_path: Path) -> None:
    """kill -9 in the middle of the timed blocks of a short sweep; the rest is measured later."""
    whole = "--pair tiny --requests 2 --batches 3 --max-new-tokens 12 --max-warmup 1"
    folder = tmp_path / "run"
    records = folder / "records.jsonl"
    first = start(f"sweep {whole} --output run")
    wait_until(first, lambda: records.is_file() and b'"block":2' in records.read_bytes())
    first.kill()
    first.wait()
    before = records.read_bytes().count(b'"kind":"batch"')
    second = start("sweep --resume run")
    out, _ = second.communicate(timeout=180)
    assert second.returncode == 0, out
    assert "batches are stored; it goes on from there" in out
    run = read_run(folder)
    assert run.header.status == "complete"
    phases = [batch.phase for batch in run.batches]
    # Timed in each of three blocks: off x off, A/A and stage x off; SCV cannot fire on a CPU.
    assert (phases.count("gate"), phases.count("timed")) == (8, 9)
    assert phases.count("warmup") == 2  # a new engine is cold
    assert len(run.batches) > before
    assert len({batch.batch for batch in run.batches}) == len(run.batches)
    greedy = {(b.phase, b.block): b.token_digests for b in run.batches}
    assert all(b.token_digests == greedy[b.phase, b.block] for b in run.batches)
