"""`nwor-bench plan`: the most that NWOR could save, from a config.json and the byte model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import complete_pairs

if TYPE_CHECKING:
    from nwor_bench.report.plan import BytePrediction

MODEL = "Model (name one)"
OUTPUT = "Output"


def plan(
    config: Annotated[
        list[Path] | None,
        typer.Option(help="A config.json, or its folder; repeat it to compare models.",
                     rich_help_panel=MODEL)
    ] = None,
    target_model: Annotated[
        str | None, typer.Option("--target-model", "--model", help="A local model folder.",
                                 rich_help_panel=MODEL)
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="The target of a fetched pair.", rich_help_panel=MODEL,
                                 autocompletion=complete_pairs)
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
    csv: Annotated[
        Path | None, typer.Option(help="Write one row per strategy.", rich_help_panel=OUTPUT)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the break-even map, one offline page.",
                                  rich_help_panel=OUTPUT)
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table, one row per model.",
                           rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print only the answer.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print only the prediction, as JSON (docs/json.md).",
                           rich_help_panel=OUTPUT)
    ] = False,
) -> None:  # fmt: skip
    """Predict the most that NWOR could save. Needs no GPU; measures nothing.

    Reads a model's config.json and counts the DRAM bytes of one verification step.
    """
    from nwor_bench.cli.plan_flags import (
        check_workload,
        load_configs,
        parse_acceptance,
        predict,
        write_output,
    )
    from nwor_bench.errors import ConfigError
    from nwor_bench.models.byte_model import Workload

    load = Workload(
        requests, context, draft_tokens, parse_acceptance(acceptance), tensor_parallel_size
    )
    check_workload(load)
    predictions = [
        predict(source, load, cache_dtype, weight_dtype)
        for source in load_configs(config or [], target_model, pair)
    ]
    if html is not None and len(predictions) > 1:
        raise ConfigError.for_field("--html", str(html), "the map shows one model; name one")
    if csv is not None:
        write_output("--csv", csv, _csv_of(predictions))
    from nwor_bench.report.plan import models_document, models_table, plan_document

    if len(predictions) > 1:
        document = models_document(predictions)
    else:
        document = plan_document(predictions[0])
    if html is not None:
        from nwor_bench.report.html import render_html

        write_output("--html", html, render_html(document))
    if as_json:
        _print_json(predictions)
    elif markdown:
        from nwor_bench.report.markdown import render_blocks

        typer.echo(render_blocks([models_table(predictions)]))
    else:
        from rich.console import Console

        from nwor_bench.report.terminal import print_document

        print_document(Console(), document.shortened(), quiet=quiet)


def _csv_of(predictions: "Sequence[BytePrediction]") -> str:
    import pandas as pd

    from nwor_bench.report.plan import csv_rows

    return pd.DataFrame([row for prediction in predictions for row in csv_rows(prediction)]).to_csv(
        index=False
    )


def _print_json(predictions: "Sequence[BytePrediction]") -> None:
    from nwor_bench import __version__
    from nwor_bench.records.files import document
    from nwor_bench.report.plan import prediction_values

    values = [prediction_values(prediction) for prediction in predictions]
    content = {"plan_version": 1, "nwor_bench": __version__, "predictions": values}
    typer.echo(document(content), nl=False)
