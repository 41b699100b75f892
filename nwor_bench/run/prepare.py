"""A run from the spec to the reports: check everything, then run it on one engine."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from nwor_bench.analysis.draft_tokens import MIN_PROMPTS
from nwor_bench.engine.arms import start_engine
from nwor_bench.engine.engine import check_arguments
from nwor_bench.engine.memory import require_memory
from nwor_bench.engine.preflight import check_flags, check_pair, with_own_dtype
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments import environment
from nwor_bench.instruments.device import uses_gpu
from nwor_bench.models.arms import with_arms
from nwor_bench.models.pairs import (
    ResolvedPair,
    check_hub_models,
    check_model_configs,
    resolve_pair,
)
from nwor_bench.records.files import RUNS, check_output, default_folder
from nwor_bench.records.store import RunData, block_name, read_run
from nwor_bench.records.types import Phase
from nwor_bench.report.text import plural
from nwor_bench.run import resume
from nwor_bench.run.dry_run import plan_lines
from nwor_bench.run.execute import EngineFactory, EngineSource, GroupEngine, Prepared, run_prepared
from nwor_bench.run.progress import check_vllm_version, console_for, tell_plan
from nwor_bench.run.run_options import DEFAULT_OPTIONS, RunOptions
from nwor_bench.workload.config import RunSpec
from nwor_bench.workload.experiment import ACCEPTANCE_RATES
from nwor_bench.workload.prompts import Encode, encode, load_prompts, load_tokenizer
from nwor_bench.workload.run_spec import PairChoice
from nwor_bench.workload.schedule import Plan, make_plan

CheckEngine = Callable[[ResolvedPair, RunSpec], None]
"""Raises ConfigError for what vLLM would refuse, without starting it."""


def run_one(
    spec: RunSpec,
    choice: PairChoice,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    engine_factory: EngineFactory = start_engine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Run one spec and write its reports; returns the exit code.

    Raises ConfigError before anything is started or written. Whatever is raised later, such as
    EngineError, passes on after what was measured until then is stored and reported.
    """
    console = console_for(options)
    check_vllm_version(console)
    if options.output is not None:
        check_output(options.output)
    prepared = _ready(spec, choice, console)
    if options.dry_run:
        tell_plan(options, plan_lines(prepared.plan, prepared.spec, prepared.pair))
        return ExitCode.OK
    now = datetime.now(UTC)
    folder = options.output or default_folder(RUNS, spec.scenario.name, prepared.pair.name, now)
    check_engine(prepared.pair, spec)
    engine = GroupEngine(engine_factory, prepared.spec, is_shared=False)
    return run_prepared(prepared, folder, engine.source(prepared), console, options)


def resume_one(
    folder: Path,
    given: Mapping[str, Any],
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    engine_factory: EngineFactory = start_engine,
    check_engine: CheckEngine = check_arguments,
) -> ExitCode:
    """Go on with the run in `folder` at its first unfinished cell; returns the exit code.

    `given` holds the command line's values by name. Raises ConfigError if one of them, the
    prompts, the libraries or the machine are not those that the run was begun with, and if the
    run is complete.
    """
    console = console_for(options)
    check_vllm_version(console)
    run = read_run(folder)
    resume.require_resumable(run, str(folder))
    resume.check_flags(given)
    spec = resume.stored_spec(run.header)
    named = run.header.choice or {}
    choice = {name.name: named.get(name.name) for name in fields(PairChoice)}
    prepared = _ready(spec, PairChoice(**choice), console)
    if options.dry_run:
        _check_resumable(run, prepared, folder, Console())
        return ExitCode.OK
    check_engine(prepared.pair, spec)
    engine = GroupEngine(engine_factory, prepared.spec, is_shared=False)
    return resume_prepared(prepared, folder, engine.source(prepared), console, options)


def resume_prepared(
    prepared: Prepared,
    folder: Path,
    source: EngineSource,
    console: Console,
    options: RunOptions = DEFAULT_OPTIONS,
    *,
    in_sweep: bool = False,
) -> ExitCode:
    """Go on with the run in `folder`, as `run_prepared` runs one.

    Raises ConfigError if it was begun with anything else.
    """
    run = read_run(folder)
    _check_resumable(run, prepared, folder, console)
    return run_prepared(prepared, folder, source, console, options, resumed=run, in_sweep=in_sweep)


def _check_resumable(run: RunData, prepared: Prepared, folder: Path, console: Console) -> None:
    """Refuse what is not the same run, and say how far it is and what a crash cut off."""
    resume.require_resumable(run, str(folder))
    resume.check_same(run, prepared.spec, prepared.pair, environment.collect())
    resume.check_plan(run, prepared.plan, prepared.encode)
    for warning in run.warnings:
        console.print(f"Warning: {warning}", highlight=False, markup=False)
    stored = len([batch for batch in run.batches if batch.phase != Phase.WARMUP])
    every = len(prepared.plan.cells) * (1 + len(prepared.plan.blocks))
    cut = [block_name(block) for block in run.cut_blocks()]
    again = f"; {' and '.join(cut)} was cut and is run again whole" if cut else ""
    line = f"{folder}: {stored} of at most {every} batches are stored; it goes on from there{again}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _ready(spec: RunSpec, choice: PairChoice, console: Console) -> Prepared:
    """A run that is prepared and fits into this machine's memory."""
    prepared = prepare(spec, choice, console)
    for note in prepared.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    require_memory(prepared.pair, spec)
    return prepared


def prepare(spec: RunSpec, choice: PairChoice, console: Console) -> Prepared:
    """Make the pair ready and decide every batch. Raises ConfigError for what cannot run."""
    pair, note = ready_pair(spec, choice, console)
    choice = choice.with_config(spec.speculative_config)
    spec = spec.experiment.completed(spec, uses_gpu())
    prompts = load_prompts(spec.scenario)
    texts = len({prompt.text for prompt in prompts})
    measures = spec.draft_counts is not None and not spec.checks_only
    if measures and ACCEPTANCE_RATES not in (spec.speculative_config or {}) and texts < MIN_PROMPTS:
        remedy = f"tokens a window need {MIN_PROMPTS} different prompts for an interval; add some"
        raise ConfigError.for_field("--prompts", plural(texts, "prompt"), remedy)
    plan = make_plan(spec, pair.name, prompts)
    return Prepared(spec, asdict(choice), pair, plan, _encode_all(plan, spec, pair), note)


def ready_pair(
    spec: RunSpec, choice: PairChoice, console: Console
) -> tuple[ResolvedPair, str | None]:
    """The pair with its models on this machine, and `with_own_dtype`'s note. Raises ConfigError."""
    check_flags(spec)
    choice = choice.with_config(spec.speculative_config)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    pair = with_arms(resolve_pair(**asdict(choice), progress=say), choice, spec.drafting_arms, say)
    check_pair(pair, spec)
    for own in (pair, *pair.arms.values()):
        check_hub_models(own)
        check_model_configs(own)
    return with_own_dtype(pair, spec)


def _encode_all(plan: Plan, spec: RunSpec, pair: ResolvedPair) -> Encode:
    """Tokenise every prompt now, so that one that does not fit is refused before a start."""
    tokenizer = load_tokenizer(pair.target)
    scenario = spec.scenario
    prompts = list(dict.fromkeys(p for b in (plan.gate, *plan.blocks) for p in b.prompts))
    lengths = (scenario.max_model_len, scenario.max_new_tokens, scenario.prompts.tokens)
    ids = encode(prompts, tokenizer, *lengths)
    encoded = dict(zip(prompts, ids, strict=True))
    return lambda block: [encoded[prompt] for prompt in block]
