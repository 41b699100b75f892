"""`nwor-bench sweep`: its flags, made from the declared options, and what they start."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.options import Declared, Panel, bare, declared, flag_of, names, read_all
from nwor_bench.workload.run_spec import DEFAULT_SCENARIO, PairChoice, RunSpec, VllmEntries
from nwor_bench.workload.scenario_values import ScenarioValues

Command = TypeVar("Command", bound=Callable[..., None])


def with_flags(*holders: type) -> Callable[[Command], Command]:
    """Give a command the flags of these classes' options; it takes their values as keywords."""
    every = [each for holder in holders for each in declared(holder) if each.option.has_flag]
    options = sorted(every, key=lambda each: list(Panel).index(each.option.panel))

    def add(command: Command) -> Command:
        own = inspect.signature(command)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = [_parameter(option) for option in options]
        command.__signature__ = own.replace(parameters=[*kept, *flags])  # type: ignore[attr-defined]
        return command

    return add


def _parameter(each: Declared) -> inspect.Parameter:
    """What typer reads a flag from."""
    option, default = each.option, _text(each.written_default)
    kind = bare(each.written)
    kind = kind if kind in (bool, int, float, str) else str
    flag = typer.Option(
        each.flag,
        *option.aliases,
        help=option.help,
        envvar=option.flag_variable,
        rich_help_panel=None if option.panel is Panel.GENERAL else option.panel.value,
    )
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind if default is not None else kind | None, flag],
    )


def _text(default: Any) -> Any:
    """A default as the command line writes it; an empty object is left out."""
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    if isinstance(default, StrEnum):
        return default.value
    return None if default == {} else default


def written_on(context: typer.Context) -> dict[str, Any]:
    """What was written on the command line, by option name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def of_holders(flags: Mapping[str, Any], *holders: type) -> dict[str, Any]:
    """Those of a command's flags that these classes declare."""
    wanted = [name for holder in holders for name in names(declared(holder))]
    return {name: flags[name] for name in wanted if name in flags}


@with_flags(PairChoice, ScenarioValues, RunSpec, VllmEntries, RunOptions)
def sweep(
    context: typer.Context,
    scenario: Annotated[
        str,
        typer.Option(
            help="A scenario's name, or the path of a scenario's .toml file."
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
    _check_early(scenario, prompts, flags, options)
    options = started(context, options)
    prepare_process(flags["counters"], options)
    raise typer.Exit(_run(written_on(context), scenario, prompts, flags, options))


def started(context: typer.Context, options: RunOptions) -> RunOptions:
    """Print the first line, before anything heavy is imported; the options with a sign of life."""
    from nwor_bench.engine.preload import DONE
    from nwor_bench.run.heartbeat import Heartbeat

    if options.quiet or options.as_json or options.dry_run:
        return options
    if DONE not in os.environ:  # else this process has replaced the one that said it
        typer.echo("loading PyTorch and vLLM ...")
    heartbeat = context.with_resource(Heartbeat(typer.echo, "loading PyTorch and vLLM"))
    return replace(options, heartbeat=heartbeat)


def _check_early(
    scenario: str, prompts: str | None, flags: dict[str, Any], options: RunOptions
) -> None:
    """Refuse typing errors before pandas, torch and vLLM are imported, which takes seconds."""
    if options.as_json and options.dry_run and options.resume is not None:
        remedy = "a resumed run has no plan to print as JSON; leave one of the two out"
        raise ConfigError.for_field("--dry-run", True, remedy)
    if options.output is not None:
        from nwor_bench.records.files import check_output

        check_output(options.output)
    for name in ("continue_on_error", "ray"):
        if getattr(options, name) and not _is_sweep(options):
            raise ConfigError.for_field(flag_of(name), True, "it needs --file")
    if options.resume is not None:
        _check_resumed(options.resume)
    elif options.file is not None:
        from nwor_bench.engine.preflight import check_sweep
        from nwor_bench.workload.sweep_file import load_sweep

        check_sweep(load_sweep(options.file))
    else:
        spec = _spec(scenario, prompts, flags)
        if flags["method"] is not None:
            from nwor_bench.models.methods import check_method

            check_method("--method", flags["method"])
        from nwor_bench.engine.preflight import check_run

        check_run(spec, PairChoice(**of_holders(flags, PairChoice)))


def _check_resumed(folder: Path) -> None:
    """Refuse a run or a sweep that is complete."""
    from nwor_bench.records.files import SWEEP_FILE

    if (folder / SWEEP_FILE).is_file():
        from nwor_bench.run.sweep_folder import SweepIndex

        SweepIndex.open(folder).require_unfinished()
    else:
        from nwor_bench.engine.preflight import require_incomplete
        from nwor_bench.records.store import read_header

        require_incomplete(read_header(folder), str(folder))


def _is_sweep(options: RunOptions) -> bool:
    """True for a sweep file, and for the folder of a sweep that is resumed."""
    from nwor_bench.records.files import SWEEP_FILE

    resume = options.resume
    return options.file is not None or (resume is not None and (resume / SWEEP_FILE).is_file())


def _spec(scenario: str, prompts: str | None, flags: dict[str, Any]) -> RunSpec:
    """The run that the flags ask for."""
    from nwor_bench.run.budget import default_amount
    from nwor_bench.workload.config import load_scenario, resolve
    from nwor_bench.workload.prompts import with_own_prompts

    workload = load_scenario(scenario)
    if prompts is not None:
        workload = with_own_prompts(workload, Path(prompts))
    values = of_holders(flags, ScenarioValues, RunSpec, VllmEntries)
    return resolve(workload, **values | default_amount(values, workload))


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
    given: dict[str, Any],
    scenario: str,
    prompts: str | None,
    flags: dict[str, Any],
    options: RunOptions,
) -> ExitCode:
    """Start or resume a run or a sweep; `given` holds the flags on the command line."""
    resume, file = options.resume, options.file
    if _is_sweep(options):
        from nwor_bench.run.sweep import check_flags, resume_sweep, run_sweep

        check_flags(given)
        if resume is not None:
            return resume_sweep(resume, file, options)
        assert file is not None  # _is_sweep
        return run_sweep(file, options)
    from nwor_bench.run.prepare import resume_one, run_one

    if resume is not None:
        return resume_one(resume, given, options)
    spec = _spec(scenario, prompts, flags)
    return run_one(spec, PairChoice(**of_holders(flags, PairChoice)), options)
