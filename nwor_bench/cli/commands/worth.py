"""`nwor-bench worth`: which draft counts pay at which batch size. A sweep of draft counts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.command import AsJson, Quiet
from nwor_bench.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from nwor_bench.workload.sweep_file import SweepFile

MOST_DRAFTS = 32
"""Most drafts per request and window; more is a typing error."""


def worth(
    context: typer.Context,
    pair: Annotated[
        str | None, typer.Option(help="A model pair's name or .toml file (default: smollm2).")
    ] = None,
    target_model: Annotated[
        str | None, typer.Option("--target-model", "--model",
                                 help="A local folder or hub name, instead of --pair.")
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", "--speculative-model",
                                 help="The drafter: a local folder or hub name.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How to draft: mtp, eagle3, eagle, draft_model, ngram, ...")
    ] = None,
    requests: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8",
    max_draft_tokens: Annotated[
        int, typer.Option("--max-draft-tokens", "--num-speculative-tokens",
                          help="Compare 0 to this many drafts per request and window.")
    ] = 4,
    engines: Annotated[
        bool, typer.Option("--engines",
                           help="An engine for each draft count, k = 0 without a drafter, compared "
                           "in whole batches (by itself if the method needs it).")
    ] = False,
    adaptive_verification: Annotated[
        bool, typer.Option("--adaptive-verification",
                           help="With --engines: one more, in which vLLM decides how many of the "
                           "most drafts to verify (GPU).")
    ] = False,
    nwor_modes: Annotated[
        str, typer.Option(help="off, or off,stage: also stage each draft count (SCV adaptive).")
    ] = "off",
    acceptance_rates: Annotated[
        str | None, typer.Option(
            help="Shapes without weights (GPU): share of windows that accept draft 1, 2, ...")
    ] = None,
    scenario: Annotated[
        str, typer.Option(help="Prompts and output lengths, by name or .toml file: short,ctx-1k.")
    ] = "short",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 64,
    time_budget: Annotated[
        str, typer.Option(help="Time of all sizes and scenarios, without the engine's start.")
    ] = "200s",
    dtype: Annotated[
        str | None, typer.Option(help="vLLM's dtype (default: the pair's; on a CPU float32).")
    ] = None,
    engine_args: Annotated[
        str | None, typer.Option(help="More arguments of vLLM's LLM(), as a JSON object.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the target.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts, order, sampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder (default: runs/TIME-worth).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run, and stop.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Is speculation worth it here? Draft counts are interleaved in one engine.

    0 to --max-draft-tokens drafts alternate window by window, at each batch size.
    With --engines each has an engine, and whole batches alternate.
    Prints tokens/s over k = 0, acceptance by position, and the line for vLLM.
    Exit codes: 0 done, 1 failed, 2 bad input, 3 a draft count changed the output.
    """
    from nwor_bench.cli.commands.sweep import prepare_process, started
    from nwor_bench.engine.preflight import check_sweep, why_engines
    from nwor_bench.instruments.device import uses_gpu
    from nwor_bench.run.run_options import RunOptions
    from nwor_bench.workload.stopping import parse_seconds

    options = RunOptions(output=output, dry_run=dry_run, quiet=quiet, as_json=as_json)
    sizes = _sizes(requests)
    if not 1 <= max_draft_tokens <= MOST_DRAFTS:
        remedy = f"write 1 to {MOST_DRAFTS}"
        raise ConfigError.for_field("--max-draft-tokens", max_draft_tokens, remedy)
    if target_model is not None and pair is not None:
        raise ConfigError.for_field("--pair", pair, "--target-model names the target already")
    scenarios = [word.strip() for word in scenario.split(",")]
    seconds = parse_seconds("--time-budget", time_budget)
    if dtype is None and not uses_gpu():
        dtype = "float32"  # in bfloat16 draft counts differ at ties: explaining them takes minutes
    scv_modes = ["off", "adaptive"] if "stage" in nwor_modes and uses_gpu() else ["off"]
    vllm_args = _json(engine_args)
    given = {
        "target_model": target_model, "draft_model": draft_model, "method": method,
        "max_new_tokens": max_new_tokens, "tensor_parallel_size": tensor_parallel_size,
        "seed": seed, "dtype": dtype, "engine_args": vllm_args,
        "acceptance_rates": _rates(acceptance_rates),
        "nwor_modes": [word.strip() for word in nwor_modes.split(",")], "scv_modes": scv_modes,
    }  # fmt: skip
    workload = pair, scenarios, sizes, max_draft_tokens, seconds
    why = None if engines else why_engines(worth_sweep(*workload, given))
    if engines or why:
        given |= {"engines": True, "adaptive_verification": adaptive_verification}
        if uses_gpu():  # kernels compile for the batches of a timed block, which are longer
            given |= {"warmup": 1, "max_warmup": 1}
    elif adaptive_verification:
        raise ConfigError.for_field("--adaptive-verification", True, "write --engines too")
    if uses_gpu() and not (engines or why):
        given["engine_args"] = _with_graphs(vllm_args or {}, sizes, max_draft_tokens)
    sweep = worth_sweep(*workload, given)
    check_sweep(sweep)
    options = started(context, options)
    prepare_process(None, options)
    raise typer.Exit(_run(sweep, options, why))


def _run(sweep: "SweepFile", options: Any, why_engines: str | None) -> ExitCode:
    from nwor_bench.run.progress import console_for
    from nwor_bench.run.sweep import run_loaded

    if why_engines is not None:
        line = f"{why_engines}: each k has an engine of its own (--engines)"
        console_for(options).print(line, highlight=False, markup=False, soft_wrap=True)
    return run_loaded(sweep, options)


def _sizes(text: str) -> list[int]:
    """`1,2,4`. Raises ConfigError for anything but different positive numbers."""
    words = [word.strip() for word in text.split(",")]
    sizes = [int(word) for word in words if word.isdecimal() and int(word)]
    if len(set(sizes)) < len(words):
        raise ConfigError.for_field("--requests", text, "write different numbers such as 1,2,4,8")
    return sizes


def _rates(text: str | None) -> list[float] | None:
    """`0.8,0.6`. Raises ConfigError for anything but numbers."""
    try:
        return None if text is None else [float(word) for word in text.split(",")]
    except ValueError:
        remedy = "write one number a draft such as 0.8,0.6,0.5,0.4"
        raise ConfigError.for_field("--acceptance-rates", text, remedy) from None


def _json(text: str | None) -> dict[str, Any] | None:
    """`{"block_size": 32}`. Raises ConfigError for anything but a JSON object."""
    from nwor_bench.workload.options import read_as

    return None if text is None else dict(read_as(dict[str, Any], "--engine-args", text))


def _with_graphs(given: dict[str, Any], sizes: list[int], most: int) -> dict[str, Any]:
    """vLLM's arguments with a graph for each window that is compared, if they name no sizes.

    vLLM's own choice has dozens for each draft count, which takes minutes for a large model, and
    none for the largest windows.
    """
    from nwor_bench.instruments.draft_counts import window_sizes

    graphs = given.get("compilation_config", {})
    named = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    if not isinstance(graphs, dict) or named & graphs.keys():
        return given
    graphs = {**graphs, "cudagraph_capture_sizes": window_sizes(sizes, most)}
    return {**given, "compilation_config": graphs}


def worth_sweep(
    pair: str | None,
    scenarios: list[str],
    requests: list[int],
    most: int,
    seconds: float,
    given: dict[str, Any],
) -> "SweepFile":
    """A sweep over batch sizes in which 0 to `most` drafts are interleaved; the same as a file.

    Args:
        seconds: of all batch sizes and scenarios together.
        given: more options by name; None gives nothing.
    """
    from pydantic import ValidationError

    from nwor_bench.analysis.draft_rates import MIN_JUDGED
    from nwor_bench.workload.options import flag_of, remedy
    from nwor_bench.workload.run_spec import DEFAULT_PAIR
    from nwor_bench.workload.sweep_file import SweepFile

    known = {name: value for name, value in given.items() if value is not None}
    dtype = known.pop("dtype", None)
    axes = {
        "pairs": (pair or DEFAULT_PAIR,), "scenarios": tuple(scenarios),
        # The largest first: it has most of the time, and the first run compiles kernels.
        "requests": tuple(sorted(requests, reverse=True)), "draft_tokens": (most,),
        "nwor_modes": known.pop("nwor_modes", ("off",)),
        "scv_modes": known.pop("scv_modes", ("off",)),
        **({} if dtype is None else {"dtype": (dtype,)}),
    }  # fmt: skip
    settings = {
        "warmup": 0, "max_warmup": 0,  # the gate warms up every draft count
        **known, "draft_counts": tuple(range(most + 1)),
        "batches": MIN_JUDGED if "engines" in known else 1,
        "time_budget": f"{seconds:g}s",
    }  # fmt: skip
    content = json.dumps({"name": "worth", "axes": axes, "settings": settings})
    try:
        return SweepFile.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors()[0]
        flag = flag_of(str(fault["loc"][1]))
        raise ConfigError.for_field(flag, fault["input"], remedy(fault)) from None
