"""`nwor-bench plan`: the most that NWOR could save, from a config.json and the byte model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nwor_bench.cli import completion

if TYPE_CHECKING:
    from nwor_bench.report.prediction.text import BytePrediction

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
                                 autocompletion=completion.pairs)
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
    if html is not None:
        from nwor_bench.report.prediction.breakeven_page import break_even_page

        write_output("--html", html, break_even_page(predictions[0]))
    if as_json:
        _print_json(predictions)
    elif quiet:
        _print_headlines(predictions)
    elif markdown:
        _print_markdown(predictions)
    elif len(predictions) > 1:
        _print_models(predictions)
    else:
        _print_prediction(predictions[0])


def _csv_of(predictions: "Sequence[BytePrediction]") -> str:
    import pandas as pd

    from nwor_bench.report.prediction.text import csv_rows

    return pd.DataFrame([row for prediction in predictions for row in csv_rows(prediction)]).to_csv(
        index=False
    )


def _print_json(predictions: "Sequence[BytePrediction]") -> None:
    from nwor_bench import __version__
    from nwor_bench.records.json_text import document
    from nwor_bench.report.prediction.text import prediction_values

    values = [prediction_values(prediction) for prediction in predictions]
    content = {"plan_version": 1, "nwor_bench": __version__, "predictions": values}
    typer.echo(document(content), nl=False)


def _print_headlines(predictions: "Sequence[BytePrediction]") -> None:
    from nwor_bench.report.prediction import text as words

    for prediction in predictions:
        name = f"{prediction.name}: " if len(predictions) > 1 else ""
        typer.echo(words.wrapped(name + words.headline(prediction)))


def _print_prediction(prediction: "BytePrediction") -> None:
    from nwor_bench.report.prediction import text as words

    typer.echo(words.wrapped(words.headline(prediction)) + "\n")
    typer.echo(words.wrapped(words.setting(prediction)) + "\n")
    _print_table(("DRAM bytes of one step", "predicted", "share"), words.step_rows(prediction))
    _print_table(words.STRATEGY_HEADERS, words.strategy_rows(prediction))
    _print_states(prediction)
    for note in words.notes(prediction):
        typer.echo(words.wrapped(note, bullet="- "))


def _print_states(prediction: "BytePrediction") -> None:
    """What a hybrid's recurrent states move, and where replaying them pays."""
    from nwor_bench.models.recurrent import REPLAY_FUSED
    from nwor_bench.report.prediction import states
    from nwor_bench.report.prediction.text import wrapped

    model, load = prediction.model, prediction.load
    if model.shape.recurrent is None:
        return
    typer.echo(wrapped(states.state_sentence(model.shape.recurrent, model.states(load))) + "\n")
    _print_table(states.STATE_HEADERS, states.state_rows(model, load))
    _print_table(*states.map_table(model, load, REPLAY_FUSED))
    for note in states.state_notes(model, load):
        typer.echo(wrapped(note, bullet="- "))


def _print_models(predictions: "Sequence[BytePrediction]") -> None:
    from nwor_bench.report.prediction import text as words

    for prediction in predictions:
        typer.echo(words.wrapped(f"{prediction.name}: {words.headline(prediction)}") + "\n")
    _print_table(words.MODEL_HEADERS, words.model_rows(predictions))
    typer.echo(words.wrapped(words.COMPARISON_NOTE))


def _print_markdown(predictions: "Sequence[BytePrediction]") -> None:
    import pandas as pd

    from nwor_bench.report.prediction import text as words

    frame = pd.DataFrame(words.model_rows(predictions), columns=list(words.MODEL_HEADERS))
    alignment = ("left", *["right"] * (len(words.MODEL_HEADERS) - 1))
    typer.echo(frame.to_markdown(index=False, colalign=alignment, disable_numparse=True))


def _print_table(headers: "Sequence[str]", rows: "Sequence[Sequence[str]]") -> None:
    from textwrap import fill

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    for place, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if place else "left"
        table.add_column(fill(header, 9) if place else header, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=80, highlight=False).print(table)
