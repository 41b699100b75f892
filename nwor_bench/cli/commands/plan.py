"""`nwor-bench plan`: the most that NWOR could save, from a config.json and the byte model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError
from nwor_bench.workload.options import Option, fraction, quantity, up_to

if TYPE_CHECKING:
    from nwor_bench.models.byte_model import Workload
    from nwor_bench.report.plan import BytePrediction

MAX_COUNT = 10**9
"""Largest number of requests, tokens or ranks; more is a typing error."""

parse_acceptance = quantity(
    fraction,
    lambda value: 0 <= value <= 1,
    "write a fraction of drafts from 0 to 1 such as 0.5 or 50%",
)
"""Accepted over drafts, as `0.5` or `50%`."""


@dataclass(frozen=True)
class PlanOptions:
    """The model, the step that is predicted, and what is printed."""

    # fmt: off
    config: Annotated[str | None, Option(
        "A config.json, a model folder, or a hub name.",
    )] = None
    requests: Annotated[int, Option(
        "Requests per step.", aliases=("--num-prompts",), check=up_to(MAX_COUNT),
    )] = 8
    context: Annotated[int, Option("Cached tokens per request.", check=up_to(MAX_COUNT))] = 1024
    draft_tokens: Annotated[int, Option(
        "Drafts per request and window.", aliases=("--num-speculative-tokens",),
        check=up_to(MAX_COUNT),
    )] = 4
    acceptance: Annotated[float, Option(
        "Accepted drafts over drafts: 0.5 or 50%.", shown="0.5", read=parse_acceptance,
    )] = 0.5
    cache_dtype: Annotated[str, Option(
        "auto (the model's), float32, bfloat16, float16, fp8.", aliases=("--kv-cache-dtype",),
    )] = "auto"
    weight_dtype: Annotated[str, Option(
        "auto (the model's), float32, bfloat16, float16, fp8, int8, int4.",
    )] = "auto"
    tensor_parallel_size: Annotated[int, Option(
        "Ranks that share the model.", check=up_to(MAX_COUNT),
    )] = 1
    # fmt: on
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def plan(options: PlanOptions) -> None:
    """Predict the most that NWOR could save. Needs no GPU; measures nothing.

    Reads a model's config.json and counts the DRAM bytes of one verification step.
    """
    if not options.config:
        raise ConfigError.at("no model", "write --config with a config.json, folder or hub name")
    from nwor_bench.models.byte_model import Workload
    from nwor_bench.models.pairs.local import find_config

    model = find_config("--config", options.config)
    load = Workload(
        options.requests,
        options.context,
        options.draft_tokens,
        options.acceptance,
        options.tensor_parallel_size,
    )
    prediction = predict(model.name, model.config, load, options.cache_dtype, options.weight_dtype)
    if options.as_json:
        _print_json(prediction)
        return
    from rich.console import Console

    from nwor_bench.report.plan import plan_document
    from nwor_bench.report.terminal import print_document

    print_document(Console(), plan_document(prediction), quiet=options.quiet)


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
