"""`nwor-bench plan`: the most that NWOR could save, from a config.json and the byte model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.command import AsJson, Quiet
from nwor_bench.errors import ConfigError

if TYPE_CHECKING:
    from nwor_bench.models.byte_model import Workload
    from nwor_bench.report.plan import BytePrediction

MOST = 10**9
"""Most requests, tokens or ranks; more is a typing error."""


def plan(
    config: Annotated[
        str | None, typer.Option(help="A config.json, a model folder, or a hub name.")
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "--num-prompts", help="Requests per step.")
    ] = 8,
    context: Annotated[int, typer.Option(help="Cached tokens per request.")] = 1024,
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", "--num-speculative-tokens",
                          help="Drafts per request and window.")
    ] = 4,
    acceptance: Annotated[
        str, typer.Option(help="Accepted drafts over drafts: 0.5 or 50%.")
    ] = "0.5",
    cache_dtype: Annotated[
        str, typer.Option("--cache-dtype", "--kv-cache-dtype",
                          help="auto (the model's), float32, bfloat16, float16, fp8.")
    ] = "auto",
    weight_dtype: Annotated[
        str, typer.Option(help="auto (the model's), float32, bfloat16, float16, fp8, int8, int4.")
    ] = "auto",
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share the model.")] = 1,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Predict the most that NWOR could save. Needs no GPU; measures nothing.

    Reads a model's config.json and counts the DRAM bytes of one verification step.
    """
    from nwor_bench.models.byte_model import Workload

    load = Workload(
        requests, context, draft_tokens, parse_acceptance(acceptance), tensor_parallel_size
    )
    _check_workload(load)
    if not config:
        raise ConfigError.at("no model", "write --config with a config.json, folder or hub name")
    from nwor_bench.models.pairs.local import find_config

    found = find_config("--config", config)
    prediction = predict(found.name, found.config, load, cache_dtype, weight_dtype)
    if as_json:
        _print_json(prediction)
    else:
        from rich.console import Console

        from nwor_bench.report.plan import plan_document
        from nwor_bench.report.terminal import print_document

        print_document(Console(), plan_document(prediction), quiet=quiet)


def parse_acceptance(text: str) -> float:
    """Accepted over drafts, as `0.5` or `50%`. Raises ConfigError unless it is from 0 to 1."""
    from nwor_bench.workload.options import fraction

    value = fraction(text)
    if value is None or not 0 <= value <= 1:
        raise ConfigError.for_field(
            "--acceptance", text, "write a fraction of drafts from 0 to 1 such as 0.5 or 50%"
        )
    return value


def _check_workload(load: "Workload") -> None:
    counts = {
        "--requests": load.requests,
        "--context": load.context,
        "--draft-tokens": load.draft_tokens,
        "--tensor-parallel-size": load.ranks,
    }
    for flag, value in counts.items():
        if not 1 <= value <= MOST:
            raise ConfigError.for_field(flag, value, f"write 1 to {MOST}")


def predict(
    name: str, config: "dict[str, Any]", load: "Workload", cache_dtype: str, weight_dtype: str
) -> "BytePrediction":
    """The prediction for one model.

    Raises ConfigError for an unknown dtype, or if the model cannot be split over the ranks.
    """
    from nwor_bench.models.byte_model import CACHE_BITS, WEIGHT_BITS, ByteModel
    from nwor_bench.models.config_json import read_shape
    from nwor_bench.models.config_reader import AUTO, MODEL_BITS, chosen_cache_dtype
    from nwor_bench.report.plan import BytePrediction

    shape = read_shape(config, "--config", name)
    if not shape.fits_ranks(load.ranks):
        raise ConfigError.for_field(
            "--tensor-parallel-size",
            load.ranks,
            f"write a divisor of the {shape.heads} attention heads that divides the "
            f"{shape.kv_heads} KV heads or is a multiple of them",
        )
    cache = chosen_cache_dtype(config, cache_dtype)
    cache = shape.dtype if cache == AUTO else cache
    if cache not in CACHE_BITS:
        raise ConfigError.unknown("--cache-dtype", cache, [*CACHE_BITS, AUTO])
    if weight_dtype not in (AUTO, *WEIGHT_BITS):
        raise ConfigError.unknown("--weight-dtype", weight_dtype, [*WEIGHT_BITS, AUTO])
    weight_bits = shape.weight_bits if weight_dtype == AUTO else WEIGHT_BITS[weight_dtype]
    if weight_bits is None:
        raise ConfigError.for_field(
            "--weight-dtype", weight_dtype, "the config's quantization_config does not say how "
            f"many bits a weight has; write one of {', '.join(WEIGHT_BITS)}",
        )  # fmt: skip
    if weight_dtype == AUTO:
        plain = weight_bits == MODEL_BITS[shape.dtype]
        weight_dtype = shape.dtype if plain else f"{weight_bits}-bit (quantised)"
    model = ByteModel(shape, CACHE_BITS[cache], weight_bits, MODEL_BITS[shape.dtype])
    return BytePrediction(name, model, load, cache, weight_dtype)


def _print_json(prediction: "BytePrediction") -> None:
    from nwor_bench import __version__
    from nwor_bench.records.files import document
    from nwor_bench.report.plan import prediction_values

    values = prediction_values(prediction)
    content = {"plan_version": 1, "nwor_bench": __version__, "predictions": [values]}
    typer.echo(document(content), nl=False)
