"""`nwor-bench supports`: what the plugin would stage of a model, from its config.json."""

from dataclasses import dataclass
from typing import Annotated

import typer
from annotated_types import Ge

from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.models.support.facts import Device, EngineFacts
from nwor_bench.workload.options import Option, Panel
from nwor_bench.workload.run_spec import CacheDtype

MODEL = "CONFIG_OR_MODEL"


@dataclass(frozen=True)
class SupportsOptions:
    """How vLLM would be started, and what is printed."""

    # fmt: off
    device: Annotated[Device, Option("hopper, blackwell or cpu.", Panel.ENGINE)] = Device.HOPPER
    draft_tokens: Annotated[int, Option(
        "Drafts per request and window.", Panel.ENGINE, aliases=("--num-speculative-tokens",),
    ), Ge(1)] = 4
    cache_dtype: Annotated[CacheDtype, Option(
        "vLLM's kv_cache_dtype.", Panel.ENGINE, aliases=("--kv-cache-dtype",),
    )] = "auto"
    # fmt: on
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def supports(
    model: Annotated[
        str,
        typer.Argument(metavar=MODEL,
                       help="A config.json, a model folder, or a hub name.")
    ],
    options: SupportsOptions,
) -> None:  # fmt: skip
    """Say whether a model's drafts would be staged, and why not. Needs no GPU.

    Exit codes: 0 answered, 2 bad input.
    """
    from nwor_bench.models.config_reader import chosen_cache_dtype
    from nwor_bench.models.pairs.local import find_config
    from nwor_bench.models.support.facts import read_facts
    from nwor_bench.models.support.predict import methods_of, predict_support
    from nwor_bench.report import support as words

    source = find_config(MODEL, model)
    facts = read_facts(source.config, source.name, MODEL, source.origin)
    cache_dtype = chosen_cache_dtype(source.config, options.cache_dtype)
    engine = EngineFacts(options.device, options.draft_tokens, cache_dtype)
    support, methods = predict_support(facts, engine), tuple(methods_of(facts, engine))
    if options.as_json:
        from nwor_bench import __version__
        from nwor_bench.records.files import document

        content = {
            "supports_version": 1,
            "nwor_bench": __version__,
            **words.support_values(support, methods),
        }
        typer.echo(document(content), nl=False)
        return
    from rich.console import Console

    from nwor_bench.report.terminal import print_document

    page = words.support_document(support, methods, source.origin)
    print_document(Console(), page, quiet=options.quiet)
