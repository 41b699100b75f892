"""`nwor-bench check`: is the output of speculative decoding that of plain decoding?

A sweep over batch sizes of two stock engines, with k drafts and with none, and only its gate.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.commands.sweep import plan_elsewhere, prepare_process, started
from nwor_bench.cli.commands.worth import file_of, read_sizes
from nwor_bench.cli.flags import with_flags
from nwor_bench.errors import ConfigError
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.options import read_all, to_plain
from nwor_bench.workload.run_spec import (
    DEFAULT_PAIR,
    DEFAULT_SCENARIO,
    PairChoice,
    RunSpec,
    ScenarioChoice,
)
from nwor_bench.workload.scenario_values import ScenarioValues

if TYPE_CHECKING:
    from nwor_bench.workload.sweep_file import SweepFile

_AXES = ("draft_tokens", "dtype")
_SETTINGS = ("draft_model", "method", "speculative_config", "prompts", "max_new_tokens",
             "max_model_len", "tensor_parallel_size", "seed", "lora", "engine_args")  # fmt: skip
_OTHERS = ("scenario", "output", "dry_run", "device", "quiet", "json")
"""Flags of `sweep` that `check` has too: axes and settings of its sweep file, and others."""

_HOLDERS = (PairChoice, ScenarioChoice, ScenarioValues, RunSpec, RunOptions)


@with_flags(*_HOLDERS, only=(*_AXES, *_SETTINGS, *_OTHERS))
def check(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A folder, a hub name, or a model pair's name or .toml file.")
    ] = DEFAULT_PAIR,
    requests: Annotated[
        str, typer.Option(help="Batch sizes at which outputs are compared.")
    ] = "1,4",
    **flags: Any,
) -> None:
    """Is my speculation's output right? Compares it with plain decoding.

    Two stock engines, with drafts and without, decode the same prompts greedily.
    NWOR is off. A differing token must be a tie (docs/tie-rule.md).
    Exit codes: 0 RIGHT, 3 WRONG, 5 NOT CHECKED, 1 failed, 2 bad input.
    """
    from nwor_bench.engine.preflight import check_sweep

    options = RunOptions(**read_all(RunOptions, flags), continue_on_error=True)
    plan_elsewhere(context, options)
    sweep = check_file(model, read_sizes("--requests", requests), flags)
    check_sweep(sweep)
    options = started(context, options)
    prepare_process(None, options)
    from nwor_bench.run.sweep import run_loaded

    raise typer.Exit(run_loaded(sweep, options))


def check_file(model: str, requests: tuple[int, ...], flags: dict[str, Any]) -> "SweepFile":
    """The sweep over batch sizes; the same as a file. `flags` are those of `sweep`."""
    pair, target = _models(model)
    of_run = {name: to_plain(value) for name, value in read_all(RunSpec, flags).items()}
    given = {name: value for name, value in (flags | of_run).items() if value is not None}
    axes = {name: [given[name]] for name in _AXES if name in given}
    axes |= {"pairs": [pair], "scenarios": [given.get("scenario", DEFAULT_SCENARIO)]}
    axes["requests"] = sorted(requests, reverse=True)  # on a GPU the first run compiles kernels
    settings = {name: given[name] for name in _SETTINGS if name in given}
    settings |= {"target_model": target, "engines": True, "batches": 0}
    return file_of("check", axes, settings)


def _models(model: str) -> tuple[str, str | None]:
    """A pair and no target, or any pair and a target of the user's own."""
    from nwor_bench.models.pairs import pair_names
    from nwor_bench.models.pairs.local import is_pair

    if is_pair(model):
        return model, None
    if "/" not in model and not Path(model).is_dir():
        raise ConfigError.unknown("MODEL", model, pair_names(), "nwor-bench list pairs")
    return DEFAULT_PAIR, model
