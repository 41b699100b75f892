"""`nwor-bench sweep`: one run from its flags, or the runs of a file."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nwor_bench.cli.flags import with_flags, written_on
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.run.run_options import Heartbeat, RunOptions
from nwor_bench.workload.options import flag_of
from nwor_bench.workload.run_spec import PairChoice, RunSpec, ScenarioChoice, VllmEntries
from nwor_bench.workload.scenario_values import ScenarioValues

if TYPE_CHECKING:
    from nwor_bench.workload.sweep_file import SweepFile


@with_flags(ScenarioValues, RunSpec, VllmEntries)
def sweep(
    context: typer.Context,
    workload: ScenarioChoice,
    pair: PairChoice,
    options: RunOptions,
    **flags: Any,
) -> None:
    """Does NWOR pay? Times stock against not writing rejected drafts to the cache.

    All cells of NWOR x SCV over one model pair, in one engine.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 correctness broken,
    130 interrupted (what was measured is kept).
    """
    plan_elsewhere(context, options)
    work = _checked(workload, pair, flags, options)
    options = started(context, options)
    prepare_process(flags["counters"], options)
    raise typer.Exit(_run(work, pair, written_on(context), options))


def plan_elsewhere(context: typer.Context, options: RunOptions) -> None:
    """Plan for --device until the command ends. Raises ConfigError but for a new run's plan."""
    from nwor_bench.instruments.device import planned_for

    if options.device is not None and (options.resume or not options.dry_run):
        remedy = "only a new run can be planned for it: write --dry-run, or leave it out"
        raise ConfigError.for_field("--device", options.device.name, remedy)
    context.with_resource(planned_for(options.device))


def started(context: typer.Context, options: RunOptions) -> RunOptions:
    """Print the first line, before anything heavy is imported; the options with a sign of life.

    Refuses a folder that is not new.
    """
    from nwor_bench.engine.preload import PRELOADED
    from nwor_bench.records.files import check_output

    if options.output is not None:
        check_output(options.output)
    if options.quiet or options.as_json or options.dry_run:
        return options
    if PRELOADED not in os.environ:  # else this process has replaced the one that said it
        typer.echo("loading PyTorch and vLLM ...")
    heartbeat = context.with_resource(Heartbeat(typer.echo, "loading PyTorch and vLLM"))
    return replace(options, heartbeat=heartbeat)


def _checked(
    workload: ScenarioChoice, pair: PairChoice, flags: dict[str, Any], options: RunOptions
) -> "RunSpec | SweepFile | None":
    """The run or the sweep that the flags ask for; None if they ask to resume one.

    Refuses typing errors before pandas, torch and vLLM are imported, which takes seconds.
    """
    if options.as_json and options.dry_run and options.resume is not None:
        remedy = "a resumed run has no plan to print as JSON; leave one of the two out"
        raise ConfigError.for_field("--dry-run", True, remedy)
    for name in ("continue_on_error", "ray"):
        if getattr(options, name) and not _is_sweep(options):
            raise ConfigError.for_field(flag_of(name), True, "it needs --file")
    if options.resume is not None:
        _check_resumed(options.resume)
        return None
    from nwor_bench.engine.preflight import check_run, check_sweep

    if options.file is not None:
        from nwor_bench.workload.sweep_file import load_sweep

        sweep = load_sweep(options.file)
        check_sweep(sweep)
        return sweep
    spec = _spec(workload, flags)
    if pair.method is not None:
        from nwor_bench.models.methods import check_method

        check_method("--method", pair.method)
    check_run(spec, pair)
    return spec


def _check_resumed(folder: Path) -> None:
    """Refuse a run or a sweep that is complete, and a run that cannot be written now."""
    from nwor_bench.records.files import RECORDS_FILE, SWEEP_FILE, only_writer

    if (folder / SWEEP_FILE).is_file():
        from nwor_bench.run.sweep_folder import SweepIndex

        SweepIndex.open(folder).require_unfinished()
    else:
        from nwor_bench.engine.preflight import require_incomplete
        from nwor_bench.records.store import read_header

        require_incomplete(read_header(folder), str(folder))
        if (folder / RECORDS_FILE).is_file():
            with only_writer(folder):
                return


def _is_sweep(options: RunOptions) -> bool:
    """True for a sweep file, and for the folder of a sweep that is resumed."""
    from nwor_bench.records.files import SWEEP_FILE

    resume = options.resume
    return options.file is not None or (resume is not None and (resume / SWEEP_FILE).is_file())


def _spec(workload: ScenarioChoice, flags: dict[str, Any]) -> RunSpec:
    from nwor_bench.run.budget import default_amount
    from nwor_bench.workload.config import load_scenario, resolve
    from nwor_bench.workload.prompts import with_own_prompts

    scenario = with_own_prompts(load_scenario(workload.scenario), workload.prompts)
    return resolve(scenario, **flags | default_amount(flags, scenario))


def prepare_process(counters: str | None, options: RunOptions) -> None:
    """Set up this process before anything heavy is imported."""
    from nwor_bench.engine.preload import import_transformers_alone, run_under_one_openmp

    if options.dry_run:
        import_transformers_alone()
    else:
        run_under_one_openmp()
    from nwor_bench.instruments.pm_sampling import run_under_own_cupti
    from nwor_bench.run.sweep_folder import reads_dram

    if reads_dram(counters, options):
        run_under_own_cupti()
    from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted

    ranges_if_wanted()  # refuses VLLM_NWOR_NVTX before anything starts


def _run(
    work: "RunSpec | SweepFile | None", pair: PairChoice, given: dict[str, Any], options: RunOptions
) -> ExitCode:
    """Start or resume a run or a sweep; `given` holds the flags on the command line."""
    resume = options.resume
    if _is_sweep(options):
        from nwor_bench.run.sweep import check_flags, resume_sweep

        check_flags(given)
        if resume is not None:
            return resume_sweep(resume, options.file, options)
    from nwor_bench.run.prepare import resume_one, run_one
    from nwor_bench.run.sweep import run_loaded

    if resume is not None:
        return resume_one(resume, given, options)
    if isinstance(work, RunSpec):
        return run_one(work, pair, options)
    assert work is not None  # _checked
    return run_loaded(work, options)
