"""A sweep from the spec to the reports: check everything, start one engine, run, report."""

import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from nwor_bench import environment
from nwor_bench.aggregate import summarise
from nwor_bench.config import SweepSpec
from nwor_bench.dry_run import plan_lines
from nwor_bench.engine import Engine, VllmEngine, check_arguments
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.memory import require_memory
from nwor_bench.pairs import ResolvedPair, resolve_pair
from nwor_bench.plan import Plan, make_plan
from nwor_bench.progress import Progress, make_progress
from nwor_bench.prompts import encode, load_prompts, load_tokenizer
from nwor_bench.records import RunStatus, Verdict
from nwor_bench.report import print_summary, write_files
from nwor_bench.runner import Encode, Sweep, blocks_for_header
from nwor_bench.store import RunStore, check_output, default_folder, read_run
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

    def with_config(self, config: Mapping[str, Any] | None) -> "PairChoice":
        """Take the method and the drafter from vLLM's speculative_config where no flag names them.

        Raises ConfigError where a flag says otherwise.
        """
        draft_model = _agreed("--draft-model", self.draft_model, config, "model")
        method = _agreed("--method", self.method, config, "method")
        return replace(self, draft_model=draft_model, method=method)


def _agreed(
    flag: str, given: str | None, config: Mapping[str, Any] | None, name: str
) -> str | None:
    value = (config or {}).get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError.for_field(f"--speculative-config: {name}", value, "write a text")
    if value is not None and given not in (None, value):
        raise ConfigError.for_field(
            flag, given, f"--speculative-config says {name} {value!r}; give one of the two"
        )
    return given if value is None else value


def run_session(
    spec: SweepSpec,
    choice: PairChoice,
    output: Path | None = None,
    *,
    dry_run: bool = False,
    verbose: bool = False,
    engine_factory: EngineFactory = VllmEngine,
    check_engine: Callable[[ResolvedPair, SweepSpec], None] = check_arguments,
) -> ExitCode:
    """Run one sweep and write its reports; returns the exit code.

    Raises ConfigError before anything is started or written. Whatever is raised later, such as
    EngineError, passes on after what was measured until then is stored and reported.
    """
    console = Console()
    require_supported_vllm()
    if output is not None:
        check_output(output)
    choice = choice.with_config(spec.speculative_config)
    pair = resolve_pair(
        choice.pair,
        target_model=choice.target_model,
        draft_model=choice.draft_model,
        method=choice.method,
        progress=lambda line: console.print(line, highlight=False, markup=False),
    )
    require_memory(pair, spec)
    plan = make_plan(spec, pair.name, load_prompts(spec.scenario))
    encoder = _encode_all(plan, spec, pair)
    if dry_run:
        for line in plan_lines(plan, spec, pair):
            console.print(line, highlight=False, markup=False)
        return ExitCode.OK
    check_engine(pair, spec)
    started_at = datetime.now(UTC)
    folder = output or default_folder(RUNS, spec.scenario.name, pair.name, started_at)
    store = RunStore.create(folder, _header(plan, spec, pair, started_at))
    log = None if verbose else folder / "engine.log"

    def measure(progress: Progress) -> None:
        progress.say(f"starting vLLM with {pair.name} (log: {log or 'this terminal'})")
        engine = engine_factory(pair, spec, log)
        try:
            _measure(Sweep(plan, spec, engine, store, encoder, progress), engine, store, progress)
        finally:
            engine.close()

    with make_progress(console, plan.cells, plan.num_batches) as progress, _stop_on_sigterm():
        status, failure = _guarded(measure, store, progress)
    code = _finish(store, status, console)
    if failure is not None:
        raise failure
    return code


def _encode_all(plan: Plan, spec: SweepSpec, pair: ResolvedPair) -> Encode:
    """Tokenise every prompt now, so that one that does not fit is refused before a start."""
    tokenizer = load_tokenizer(pair.target)
    scenario = spec.scenario
    prompts = list(dict.fromkeys(p for b in (plan.gate, *plan.blocks) for p in b.prompts))
    ids = encode(prompts, tokenizer, scenario.max_model_len, scenario.max_new_tokens)
    encoded = dict(zip(prompts, ids, strict=True))
    return lambda block: [encoded[prompt] for prompt in block]


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
        "command": shlex.join(["nwor-bench", *sys.argv[1:]]),
        "started_at": started_at.isoformat(timespec="seconds"),
        "finished_at": None,
    }


def _measure(sweep: Sweep, engine: Engine, store: RunStore, progress: Progress) -> None:
    """Run the plan on a started engine; what the gate found is stored however it ends."""
    status = engine.status()
    store.update({"engine": status})
    progress.say(
        f"engine start {status['start_count']}: {status['start_seconds']:.1f} s, "
        f"{status['target_layers']} target layers, {status['attention_backend']}"
    )
    began = time.perf_counter()
    try:
        sweep.run()
    finally:
        store.update({"parity": _parity(sweep), "measuring_s": _since(began)})


def _guarded(
    measure: Callable[[Progress], None], store: RunStore, progress: Progress
) -> tuple[RunStatus, Exception | None]:
    """How measuring ended, noted in the records; the run is reported before an error goes on."""
    try:
        measure(progress)
    except KeyboardInterrupt:
        progress.say("interrupted: keeping what was measured")
        store.append_event({"event": "interrupted", "at": _now()})
        return RunStatus.PARTIAL, None
    except Exception as error:
        store.append_event({"event": "failed", "at": _now(), "error": str(error) or repr(error)})
        return RunStatus.FAILED, error
    return RunStatus.COMPLETE, None


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
