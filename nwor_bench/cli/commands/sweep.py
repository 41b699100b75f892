"""`nwor-bench sweep`: the command line of a run or a sweep of runs, and nothing else."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from nwor_bench.cli.command import complete_scenarios
from nwor_bench.cli.option_flags import of_holders, with_flags, written_on
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.run.run_options import RunOptions, check_output_flags
from nwor_bench.workload.options import flag_of, read_all
from nwor_bench.workload.run_spec import (
    DEFAULT_SCENARIO,
    PairChoice,
    RunSpec,
    ScenarioValues,
    VllmEntries,
)


@with_flags(PairChoice, ScenarioValues, RunSpec, VllmEntries, RunOptions)
def sweep(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Option(
            help="A scenario's name, or the path of a scenario's .toml file.",
            autocompletion=complete_scenarios,
        ),
    ] = DEFAULT_SCENARIO,
    prompts: Annotated[
        str | None,
        typer.Option(help="Your prompts instead of the scenario's: a .jsonl file with `text` or "
                          "`prompt` in each line.")
    ] = None,
    **flags: Any,
) -> None:  # fmt: skip
    """Sweep NWOR x SCV over one model pair, in one engine.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 correctness broken,
    130 interrupted (what was measured is kept).
    """
    options = RunOptions(**read_all(RunOptions, flags))
    check_output_flags(options)
    _check_early(scenario, prompts, flags, options)
    _prepare_process(flags["counters"], options)
    from nwor_bench.report.prometheus import sweep_metrics

    metrics = context.with_resource(
        sweep_metrics(
            None if options.dry_run else options.prometheus_port,
            partial(typer.echo, err=options.quiet or options.as_json),
        )
    )
    options = replace(options, on_batch=metrics)
    raise typer.Exit(_run(written_on(context), scenario, prompts, flags, options))


def _check_early(
    scenario: str, prompts: str | None, flags: dict[str, Any], options: RunOptions
) -> None:
    """Refuse slips of the keyboard before pandas, torch and vLLM are imported: these take seconds.

    All of it is checked again where it is used.
    """
    if options.output is not None:
        from nwor_bench.records.run_folder import check_output

        check_output(options.output)
    if options.file is not None:
        from nwor_bench.workload.sweep_file import load_sweep

        load_sweep(options.file)
        return
    for name in ("continue_on_error", "ray"):
        if getattr(options, name) and options.resume is None:
            raise ConfigError.for_field(flag_of(name), True, "it needs --file")
    if options.resume is not None:
        return
    _spec(scenario, prompts, flags)
    if flags["pair"] is not None:
        from nwor_bench.models.pairs.pair import load_pair

        load_pair(flags["pair"])


def _spec(scenario: str, prompts: str | None, flags: dict[str, Any]) -> RunSpec:
    """The run that the flags ask for."""
    from nwor_bench.run.budget import default_stop
    from nwor_bench.workload.config import load_scenario, resolve
    from nwor_bench.workload.prompts import with_own_prompts

    workload = load_scenario(scenario)
    if prompts is not None:
        workload = with_own_prompts(workload, Path(prompts))
    values = of_holders(flags, ScenarioValues, RunSpec, VllmEntries)
    return resolve(workload, **values | default_stop(values))


def _prepare_process(counters: str | None, options: RunOptions) -> None:
    """Set up this process before anything heavy is imported."""
    from nwor_bench.engine.preload import run_under_one_openmp

    run_under_one_openmp()
    from nwor_bench.instruments.cupti_library import run_under_own_cupti
    from nwor_bench.run.sweep_folder import reads_dram

    if reads_dram(counters, options):
        run_under_own_cupti()
    from nwor_bench.instruments.nvtx_ranges import ranges_if_wanted

    ranges_if_wanted()  # refuses VLLM_NWOR_NVTX before anything starts


def _run(
    given: dict[str, Any],
    scenario: str,
    prompts: str | None,
    flags: dict[str, Any],
    options: RunOptions,
) -> ExitCode:
    """Begin or go on with a run or a sweep; `given` is what the command line says of `flags`."""
    from nwor_bench.run.sweep_folder import INDEX_FILE

    resume, file = options.resume, options.file
    if resume is not None and (file is not None or (resume / INDEX_FILE).is_file()):
        from nwor_bench.run.sweep import check_flags, resume_sweep

        check_flags(given)
        return resume_sweep(resume, file, options)
    if file is not None:
        from nwor_bench.run.sweep import check_flags, run_sweep

        check_flags(given)
        return run_sweep(file, options)
    for name in ("continue_on_error", "ray"):
        if getattr(options, name):
            raise ConfigError.for_field(flag_of(name), True, "it needs --file")
    from nwor_bench.run.prepare import resume_one, run_one

    if resume is not None:
        return resume_one(resume, given, options)
    spec = _spec(scenario, prompts, flags)
    return run_one(spec, PairChoice(**of_holders(flags, PairChoice)), options)
