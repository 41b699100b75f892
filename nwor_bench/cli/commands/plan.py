"""`nwor-bench plan MODEL`: what would happen to a model, from its config.json."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError
from nwor_bench.instruments.cards import Card, Device, card_named
from nwor_bench.workload.options import Option, fraction, quantity, up_to
from nwor_bench.workload.run_spec import MAX_DRAFT_TOKENS, CacheDtype

if TYPE_CHECKING:
    from nwor_bench.models.byte_model import Workload
    from nwor_bench.report.plan_bytes import BytePrediction

MODEL = "MODEL"

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
    """The device and the step that are predicted, and what is printed."""

    # fmt: off
    device: Annotated[Card | None, Option(
        "One GPU, such as h100, l4 or rtx4090, or cpu (default: all GPUs, attention as on an "
        "H100).", written=str, read=card_named,
    )] = None
    requests: Annotated[int, Option(
        "Requests per step.", aliases=("--num-prompts",), check=up_to(MAX_COUNT),
    )] = 8
    context: Annotated[int, Option("Cached tokens per request.", check=up_to(MAX_COUNT))] = 1024
    draft_tokens: Annotated[int, Option(
        "Drafts per request and window.", aliases=("--num-speculative-tokens",),
        check=up_to(MAX_DRAFT_TOKENS),
    )] = 4
    acceptance: Annotated[float, Option(
        "Accepted drafts over drafts: 0.5 or 50%.", shown="0.5", read=parse_acceptance,
    )] = 0.5
    cache_dtype: Annotated[CacheDtype, Option(
        "vLLM's kv_cache_dtype.", aliases=("--kv-cache-dtype",),
    )] = "auto"
    weight_dtype: Annotated[str, Option(
        "auto (the model's), bfloat16, fp8, int4, mxfp4, ...",
    )] = "auto"
    tensor_parallel_size: Annotated[int, Option(
        "GPUs that share the model; the table counts from there.", check=up_to(MAX_COUNT),
    )] = 1
    verbose: Annotated[bool, Option(
        "Also the bytes of a step, and what is assumed.", aliases=("-v",),
    )] = False
    # fmt: on
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar=MODEL,
                       help="A model folder, a hub name, a config.json, or a pair's name.")
    ],
    options: PlanOptions,
) -> None:  # fmt: skip
    """What would happen to MODEL: layers staged, nearest measurements, GPUs, bytes. Needs no GPU.

    Reads the config.json only; nothing is run. Exit codes: 0 answered, 2 bad input.
    """
    from nwor_bench.models.byte_model import Workload
    from nwor_bench.models.config_reader import chosen_cache_dtype
    from nwor_bench.models.pairs.local import find_config
    from nwor_bench.models.support.facts import EngineFacts, read_facts
    from nwor_bench.models.support.predict import methods_of, predict_support
    from nwor_bench.report import plan as words

    load = Workload(
        options.requests,
        options.context,
        options.draft_tokens,
        options.acceptance,
        options.tensor_parallel_size,
    )
    source = find_config(MODEL, model)
    facts = read_facts(source.config, source.name, MODEL, source.origin)
    cache = chosen_cache_dtype(source.config, options.cache_dtype)
    device = Device.HOPPER if options.device is None else options.device.device
    engine = EngineFacts(device, options.draft_tokens, cache)
    try:
        predicted, why = predict(source.name, source.config, load, cache, options.weight_dtype), ""
    except NotCovered as error:
        predicted, why = None, str(error)
    found = words.ModelPlan(
        predict_support(facts, engine), tuple(methods_of(facts, engine)), load, predicted, why,
        options.device, source.origin,
    )  # fmt: skip
    _print(found, options)


def _print(found: Any, options: PlanOptions) -> None:
    from nwor_bench.report import plan as words

    if options.as_json:
        from nwor_bench import __version__
        from nwor_bench.records.files import document

        head = {"plan_version": 2, "nwor_bench": __version__}
        typer.echo(document({**head, **words.plan_values(found)}), nl=False)
        return
    from rich.console import Console

    from nwor_bench.report.terminal import print_document

    page = words.plan_document(found)
    if not options.verbose:
        page = page.shortened("-v: the bytes of a step, and what is assumed.")
    print_document(Console(), page, quiet=options.quiet)


class NotCovered(Exception):
    """The byte model says nothing of a model, a cache or its weights; the message says why."""


def predict(
    name: str, config: "dict[str, Any]", load: "Workload", cache_dtype: str, weight_dtype: str
) -> "BytePrediction":
    """The prediction for one model.

    Raises NotCovered, and ConfigError for an unknown dtype, or if the model cannot be split over
    the ranks.
    """
    from nwor_bench.models.byte_model import CACHE_BITS, ByteModel
    from nwor_bench.models.config_json import WEIGHT_BITS, read_shape
    from nwor_bench.models.config_reader import AUTO, MODEL_BITS, chosen_cache_dtype
    from nwor_bench.report.plan_bytes import BytePrediction

    if weight_dtype not in (AUTO, *WEIGHT_BITS):
        raise ConfigError.unknown("--weight-dtype", weight_dtype, [*WEIGHT_BITS, AUTO])
    try:
        shape = read_shape(config, MODEL, name)
    except ConfigError as error:
        raise NotCovered(str(error).partition("is invalid; ")[2]) from error
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
        raise NotCovered(f"a cache in {cache} has no fixed size an element")
    weight_bits = shape.weight_bits if weight_dtype == AUTO else WEIGHT_BITS[weight_dtype]
    if weight_bits is None:
        raise NotCovered(
            "the config's quantization_config does not say how many bits a weight has; write one "
            f"of --weight-dtype {', '.join(WEIGHT_BITS)}"
        )
    if weight_dtype == AUTO:
        plain = weight_bits == MODEL_BITS[shape.dtype]
        weight_dtype = shape.dtype if plain else f"{weight_bits:g}-bit (quantised)"
    model = ByteModel(shape, CACHE_BITS[cache], weight_bits, MODEL_BITS[shape.dtype])
    return BytePrediction(name, model, load, cache, weight_dtype)
