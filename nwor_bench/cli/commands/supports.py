"""`nwor-bench supports`: what the plugin would stage of a model, from its config.json."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet

if TYPE_CHECKING:
    from nwor_bench.models.pairs.local import FoundConfig
    from nwor_bench.models.support.facts import EngineFacts

ENGINE = "Engine"
MODEL = "CONFIG_OR_MODEL"


def supports(
    model: Annotated[
        str,
        typer.Argument(metavar=MODEL,
                       help="A config.json, a model folder, or a hub name.")
    ],
    device: Annotated[
        str, typer.Option(help="hopper, blackwell or cpu.", rich_help_panel=ENGINE)
    ] = "hopper",
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", "--num-speculative-tokens",
                          help="Drafts per request and window.", rich_help_panel=ENGINE)
    ] = 4,
    cache_dtype: Annotated[
        str, typer.Option("--cache-dtype", "--kv-cache-dtype", help="vLLM's kv_cache_dtype.",
                          rich_help_panel=ENGINE)
    ] = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say whether a model's drafts would be staged, and why not. Needs no GPU.

    Exit codes: 0 answered, 2 bad input.
    """
    engine = _engine(device, draft_tokens, cache_dtype)
    from nwor_bench.models.pairs.local import find_config

    _show(find_config(MODEL, model), engine, quiet, as_json)


def _engine(device: str, draft_tokens: int, cache_dtype: str) -> "EngineFacts":
    from nwor_bench.errors import ConfigError
    from nwor_bench.models.support.facts import Device, EngineFacts
    from nwor_bench.workload.options import read_as
    from nwor_bench.workload.run_spec import CacheDtype

    if draft_tokens < 1:
        raise ConfigError.for_field("--draft-tokens", draft_tokens, "write 1 or more")
    read_as(CacheDtype, "--cache-dtype", cache_dtype)
    return EngineFacts(read_as(Device, "--device", device), draft_tokens, cache_dtype)


def _show(found: "FoundConfig", engine: "EngineFacts", quiet: bool, as_json: bool) -> None:
    from nwor_bench.models.config_reader import chosen_cache_dtype
    from nwor_bench.models.support.facts import read_facts
    from nwor_bench.models.support.predict import methods_of, predict_support
    from nwor_bench.report import support as words

    model = read_facts(found.config, found.name, MODEL, found.origin)
    engine = replace(engine, cache_dtype=chosen_cache_dtype(found.config, engine.cache_dtype))
    support, methods = predict_support(model, engine), tuple(methods_of(model, engine))
    if as_json:
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

    page = words.support_document(support, methods, found.origin)
    print_document(Console(), page, quiet=quiet)
