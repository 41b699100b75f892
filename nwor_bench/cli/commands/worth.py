"""`nwor-bench worth`: which draft counts pay at which batch size. A sweep of draft counts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.commands.sweep import plan_elsewhere, prepare_process, started
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError, ExitCode
from nwor_bench.instruments.cards import Card, card_named
from nwor_bench.run.run_options import RunOptions
from nwor_bench.workload.options import Option, flag_of, up_to
from nwor_bench.workload.run_spec import DEFAULT_PAIR
from nwor_bench.workload.stopping import parse_half_width, parse_seconds

if TYPE_CHECKING:
    from nwor_bench.workload.sweep_file import SweepFile

MAX_DRAFTS = 32
"""Largest number of drafts per request and window; more is a typing error."""


def read_sizes(flag: str, text: str) -> tuple[int, ...]:
    """`1,2,4`. Raises ConfigError for anything but different positive numbers."""
    words = _words(text)
    sizes = [int(word) for word in words if word.isdecimal() and int(word)]
    if len(set(sizes)) < len(words):
        raise ConfigError.for_field(flag, text, "write different numbers from 1, such as 1,2,4,8")
    return tuple(sizes)


def _rates(flag: str, text: str) -> list[float]:
    """`0.8,0.6`. Raises ConfigError for anything but numbers."""
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        wanted = "write one number a draft such as 0.8,0.6,0.5,0.4"
        raise ConfigError.for_field(flag, text, wanted) from None


def _arms(flag: str, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    from nwor_bench.models.arms import read_arms

    return read_arms(flag, texts)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


@dataclass(frozen=True)
class WorthOptions:
    """The models, the draft counts and batch sizes, and where the runs go."""

    # fmt: off
    pair: Annotated[str | None, Option(
        "A model pair's name or .toml file (default: smollm2).",
    )] = None
    target_model: Annotated[str | None, Option(
        "A local folder or hub name, instead of --pair.", flag="--model",
        aliases=("--model",),
    )] = None
    draft_model: Annotated[str | None, Option(
        "The drafter: a local folder or hub name.", aliases=("--speculative-model",),
    )] = None
    method: Annotated[str | None, Option(
        "How to draft: mtp, eagle3, eagle, draft_model, ngram, ...",
    )] = None
    arms: Annotated[dict[str, dict[str, Any]] | None, Option(
        "Compare methods, one flag each: ngram, eagle3=DRAFTER, or NAME={speculative_config}.",
        name="arm", written=list[str], read=_arms,
    )] = None
    requests: Annotated[tuple[int, ...], Option("Batch sizes.", read=read_sizes)] = (1, 2, 4, 8)
    max_draft_tokens: Annotated[int, Option(
        "Compare 0 to this many drafts per request and window.",
        aliases=("--num-speculative-tokens",), check=up_to(MAX_DRAFTS),
    )] = 4
    engines: Annotated[bool, Option(
        "An engine for each draft count, k = 0 without a drafter, compared in whole batches (by "
        "itself if the method needs it).",
    )] = False
    adaptive_verification: Annotated[bool, Option(
        "With --engines: one more, in which vLLM decides how many of the most drafts to verify "
        "(GPU).",
    )] = False
    nwor_modes: Annotated[str, Option(
        "off, or off,stage: also stage each draft count (SCV adaptive).",
    )] = "off"
    acceptance_rates: Annotated[list[float] | None, Option(
        "Shapes without weights (GPU): share of windows that accept draft 1, 2, ...", read=_rates,
    )] = None
    scenario: Annotated[str, Option(
        "Prompts and output lengths, by name or .toml file: short,ctx-1k.",
    )] = "short"
    prompts: Annotated[str | None, Option(
        "Your prompts instead of the scenario's: a .jsonl file with `text` or `prompt` in each "
        "line.",
    )] = None
    max_new_tokens: Annotated[int, Option("Tokens to generate per request.")] = 64
    max_model_len: Annotated[int | None, Option("Prompt plus output, tokens.")] = None
    temperature: Annotated[float, Option("0 is greedy; the gate always is.")] = 0.0
    ci_width: Annotated[float | None, Option(
        "Stop at a batch size when tokens/s over k = 0 is within +- this much for every k, e.g. "
        "5%.", written=str, read=parse_half_width,
    )] = None
    time_budget_s: Annotated[float, Option(
        "Time of all sizes and scenarios, without the engine's start.", name="time_budget",
        shown="200s", read=parse_seconds,
    )] = 200.0
    dtype: Annotated[str | None, Option(
        "vLLM's dtype (default: the pair's; on a CPU float32).",
    )] = None
    lora: Annotated[str | None, Option("A LoRA adapter's folder; every request uses it.")] = None
    engine_args: Annotated[dict[str, Any] | None, Option(
        "More arguments of vLLM's LLM(), as a JSON object.",
    )] = None
    tensor_parallel_size: Annotated[int, Option("Ranks that share the target.")] = 1
    seed: Annotated[int, Option("Seed of prompts, order, sampling.")] = 0
    output: Annotated[Path | None, Option("Folder (default: runs/TIME-worth).")] = None
    dry_run: Annotated[bool, Option("Show what would run, and stop.")] = False
    device: Annotated[Card | None, Option(
        "With --dry-run: plan for this GPU, such as h100 or l4, not for this machine.",
        written=str, read=card_named,
    )] = None
    # fmt: on
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def worth(context: typer.Context, options: WorthOptions) -> None:
    """How many drafts pay? Times draft counts against plain decoding, at each batch size.

    0 to --max-draft-tokens drafts alternate window by window, in one engine.
    With --engines each has an engine, and whole batches alternate; with --arm each method.
    Prints tokens/s over k = 0, acceptance by position, and the line for vLLM.
    Exit codes: 0 done, 1 failed, 2 bad input, 3 a draft count changed the output.
    """
    from nwor_bench.engine.preflight import check_sweep, why_engines
    from nwor_bench.instruments.device import uses_gpu

    if options.target_model is not None and options.pair is not None:
        wanted = "--model names the target already"
        raise ConfigError.for_field("--pair", options.pair, wanted)
    shown = RunOptions(
        output=options.output,
        dry_run=options.dry_run,
        device=options.device,
        quiet=options.quiet,
        as_json=options.as_json,
    )
    plan_elsewhere(context, shown)
    if options.dtype is None and not uses_gpu():
        # In bfloat16 draft counts differ at ties: explaining them takes minutes.
        options = replace(options, dtype="float32")
    if given := options.arms:
        _check_alone(options)
        options = replace(options, engines=True)
        sweep = worth_sweep(options)
        reasons = {name: why_engines(sweep, arm["method"]) for name, arm in given.items()}
        arms = {name: {"engines": bool(reasons[name]), **arm} for name, arm in given.items()}
        options = replace(options, arms=arms)
        why = "; ".join(filter(None, reasons.values())) or None
    else:
        why = None if options.engines else why_engines(worth_sweep(options))
        options = replace(options, engines=options.engines or why is not None)
    if options.adaptive_verification and not options.engines:
        raise ConfigError.for_field("--adaptive-verification", True, "write --engines too")
    sweep = worth_sweep(options)
    check_sweep(sweep)
    shown = started(context, shown)
    prepare_process(None, shown)
    raise typer.Exit(_run(sweep, shown, why))


def _check_alone(options: WorthOptions) -> None:
    """Refuse flags that say what --arm says."""
    for name in ("method", "draft_model", "engines", "adaptive_verification"):
        if value := getattr(options, name):
            raise ConfigError.for_field(flag_of(name), value, "--arm says it; leave it out")


def _run(sweep: "SweepFile", options: RunOptions, why_engines: str | None) -> ExitCode:
    from nwor_bench.run.progress import console_for
    from nwor_bench.run.sweep import run_loaded

    if why_engines is not None:
        line = f"{why_engines}: each k has an engine of its own (--engines)"
        console_for(options).print(line, highlight=False, markup=False, soft_wrap=True)
    return run_loaded(sweep, options)


def worth_sweep(options: WorthOptions) -> "SweepFile":
    """The sweep over batch sizes in which draft counts are interleaved; the same as a file."""
    return file_of("worth", _axes(options), _settings(options))


def file_of(name: str, axes: Mapping[str, Any], settings: Mapping[str, Any]) -> "SweepFile":
    """A sweep file of these tables. Raises ConfigError that names the flag of a wrong value."""
    from pydantic import ValidationError

    from nwor_bench.workload.options import remedy
    from nwor_bench.workload.sweep_file import SweepFile

    content = json.dumps({"name": name, "axes": axes, "settings": settings})
    try:
        return SweepFile.model_validate_json(content)
    except ValidationError as error:
        fault = error.errors()[0]
        flag = flag_of(str(fault["loc"][1]))
        raise ConfigError.for_field(flag, fault["input"], remedy(fault)) from None


def _axes(options: WorthOptions) -> dict[str, Any]:
    from nwor_bench.instruments.device import uses_gpu

    adapts = "stage" in options.nwor_modes and uses_gpu()
    return {
        "pairs": [options.pair or DEFAULT_PAIR],
        "scenarios": _words(options.scenario),
        # The largest first: it has most of the time, and the first run compiles kernels.
        "requests": sorted(options.requests, reverse=True),
        "draft_tokens": [options.max_draft_tokens],
        "temperature": [options.temperature],
        "nwor_modes": _words(options.nwor_modes),
        "scv_modes": ["off", "adaptive"] if adapts else ["off"],
        "dtype": [] if options.dtype is None else [options.dtype],
    }


def _settings(options: WorthOptions) -> dict[str, Any]:
    """What all of its runs share; None is what a file leaves out."""
    from nwor_bench.analysis.draft_rates import MIN_JUDGED
    from nwor_bench.instruments.device import uses_gpu

    named = ("target_model", "draft_model", "method", "max_new_tokens", "tensor_parallel_size",
             "seed", "acceptance_rates", "engines", "arms", "prompts", "lora",
             "max_model_len")  # fmt: skip
    most, engine_args = options.max_draft_tokens, options.engine_args or {}
    if uses_gpu() and (options.arms or not options.engines):
        engine_args = _with_graphs(engine_args, options.requests, most)
    # The gate warms up every draft count in one engine. With several, kernels of a GPU compile for
    # the batches of a timed block, which are longer.
    warmup = 1 if uses_gpu() and options.engines else 0
    return {
        **{name: getattr(options, name) for name in named},
        "adaptive_verification": options.adaptive_verification and options.engines,
        "engine_args": engine_args,
        "draft_counts": list(range(most + 1)),
        "warmup": warmup,
        "max_warmup": warmup,
        "batches": MIN_JUDGED if options.engines else 1,
        "time_budget": f"{options.time_budget_s:g}s",
        "ci_width": None if options.ci_width is None else str(options.ci_width),
    }


def _with_graphs(given: dict[str, Any], sizes: Sequence[int], most: int) -> dict[str, Any]:
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
