"""A sweep from the spec to the reports: check everything, start one engine, run, report."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from nwor_bench import environment
from nwor_bench.aggregate import summarise
from nwor_bench.config import SweepSpec
from nwor_bench.engine import Engine, VllmEngine
from nwor_bench.errors import BenchError, ExitCode
from nwor_bench.memory import GIB, kv_cache_bytes, require_memory
from nwor_bench.pairs import ResolvedPair, resolve_pair
from nwor_bench.plan import Plan, make_plan
from nwor_bench.progress import make_progress
from nwor_bench.prompts import encode, load_prompts, load_tokenizer
from nwor_bench.records import RunStatus, Verdict
from nwor_bench.report import print_summary, write_files
from nwor_bench.runner import Encode, Sweep, blocks_for_header
from nwor_bench.store import RunStore, default_folder, read_run
from nwor_bench.versions import require_supported_vllm

RUNS = Path("runs")

EngineFactory = Callable[[ResolvedPair, SweepSpec, Path | None], Engine]


@dataclass(frozen=True)
class PairChoice:
    """The pair as the command line names it; all None is the default pair."""

    pair: str | None = None
    target_model: str | None = None
    draft_model: str | None = None
    method: str | None = None


def run_session(
    spec: SweepSpec,
    choice: PairChoice,
    output: Path | None = None,
    *,
    dry_run: bool = False,
    verbose: bool = False,
    engine_factory: EngineFactory = VllmEngine,
) -> ExitCode:
    """Run one sweep and write its reports; returns the exit code.

    Raises ConfigError before anything expensive starts; EngineError if vLLM fails (what was
    measured until then is kept and reported as partial).
    """
    console = Console()
    require_supported_vllm()
    pair = resolve_pair(
        choice.pair,
        target_model=choice.target_model,
        draft_model=choice.draft_model,
        method=choice.method,
        progress=lambda line: console.print(line, highlight=False, markup=False),
    )
    plan = make_plan(spec, pair.name, load_prompts(spec.scenario))
    encoder = _encode_all(plan, spec, pair)
    require_memory(pair, spec)
    if dry_run:
        _print_plan(console, plan, spec, pair)
        return ExitCode.OK
    started_at = datetime.now(UTC)
    folder = output or default_folder(RUNS, spec.scenario.name, pair.name, started_at)
    store = RunStore.create(folder, _header(plan, spec, pair, started_at))
    status = _run(plan, spec, pair, store, encoder, console, verbose, engine_factory)
    return _finish(store, status, console)


def _encode_all(plan: Plan, spec: SweepSpec, pair: ResolvedPair) -> Encode:
    """Tokenise every block now, so that a prompt that does not fit is refused before a start."""
    tokenizer = load_tokenizer(pair.target)
    scenario = spec.scenario
    encoded = {
        block.prompts: encode(
            block.prompts, tokenizer, scenario.max_model_len, scenario.max_new_tokens
        )
        for block in (plan.gate, *plan.blocks)
    }
    return encoded.__getitem__


def _header(
    plan: Plan, spec: SweepSpec, pair: ResolvedPair, started_at: datetime
) -> dict[str, Any]:
    return {
        "scenario": spec.to_dict()["scenario"],
        "pair": asdict(pair),
        "spec": spec.to_dict(),
        "engine": None,
        "environment": environment.collect(),
        "parity": None,
        "noise_floor": None,
        "blocks": blocks_for_header(plan),
        "command": " ".join(["nwor-bench", *sys.argv[1:]]),
        "started_at": started_at.isoformat(timespec="seconds"),
        "finished_at": None,
    }


def _run(
    plan: Plan,
    spec: SweepSpec,
    pair: ResolvedPair,
    store: RunStore,
    encoder: Encode,
    console: Console,
    verbose: bool,
    engine_factory: EngineFactory,
) -> RunStatus:
    """Start the engine and run the plan; an interruption leaves a partial run."""
    with make_progress(console, plan.cells, plan.num_batches) as progress, _stop_on_sigterm():
        try:
            log = None if verbose else store.folder / "engine.log"
            progress.say(f"starting vLLM with {pair.name} (log: {log or 'this terminal'})")
            engine = engine_factory(pair, spec, log)
            status = engine.status()
            store.update({"engine": status})
            progress.say(
                f"engine start {status['start_count']}: {status['start_seconds']:.1f} s, "
                f"{status['target_layers']} target layers, {status['attention_backend']}"
            )
            began = time.perf_counter()
            sweep = Sweep(plan, spec, engine, store, encoder, progress)
            try:
                sweep.run()
            finally:
                store.update({"parity": _parity(sweep), "measuring_s": _since(began)})
            engine.close()
        except KeyboardInterrupt:
            progress.say("interrupted: keeping what was measured")
            store.append_event({"event": "interrupted", "at": _now()})
            return RunStatus.PARTIAL
        except BenchError as error:
            store.append_event({"event": "failed", "at": _now(), "error": str(error)})
            _finish(store, RunStatus.FAILED, console)
            raise
    return RunStatus.COMPLETE


def _parity(sweep: Sweep) -> dict[str, Any]:
    return {
        "compared": "greedy tokens and per-position acceptance, request by request",
        "broken": {cell.label: reason for cell, reason in sweep.broken.items()},
    }


def _finish(store: RunStore, status: RunStatus, console: Console) -> ExitCode:
    """Final status, reports, the table on the terminal."""
    store.finish(status, {"finished_at": _now()})
    run = read_run(store.folder)
    cells = summarise(run)
    write_files(store.folder, run, cells)
    print_summary(console, run, cells, store.folder)
    if any(cell.verdict == Verdict.INVALID for cell in cells):
        return ExitCode.CORRECTNESS_BROKEN
    return ExitCode.INTERRUPTED if status is RunStatus.PARTIAL else ExitCode.OK


def _print_plan(console: Console, plan: Plan, spec: SweepSpec, pair: ResolvedPair) -> None:
    lines = [
        f"pair {pair.name}: {pair.method}, {spec.dtype or pair.dtype}, one engine start, "
        f"{kv_cache_bytes(pair, spec) / GIB:.2f} GiB of KV cache",
        f"scenario {spec.scenario.name}: {spec.scenario.requests} requests x "
        f"{spec.scenario.max_new_tokens} new tokens, {spec.scenario.draft_tokens} drafts",
        f"{plan.num_batches} batches: {plan.warmup} to warm up, {len(plan.cells)} for the gate, "
        f"{len(plan.blocks)} blocks x {len(plan.cells)} cells",
    ]
    lines += [
        f"block {block.number}: " + ", ".join(cell.label for cell in block.order)
        for block in plan.blocks
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False)


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a CI runner's stop keeps what was measured too."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
