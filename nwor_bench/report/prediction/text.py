"""The byte model's predictions as sentences and table rows. Nothing is measured."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.strategies import BY_REFERENCE, DIRECT, STRATEGIES, Strategy
from nwor_bench.report.prediction.numbers import percent, signed_size
from nwor_bench.report.prediction.states import recurrent_values
from nwor_bench.report.text import size

WIDTH = 80

NEVER = "never"


@dataclass(frozen=True)
class BytePrediction:
    """The prediction for one model and workload; dtypes are names for display."""

    name: str
    model: ByteModel
    load: Workload
    cache_dtype: str
    weight_dtype: str

    @property
    def most_share(self) -> float:
        """The most that any strategy can save, as a fraction of the step's DRAM bytes."""
        return self.model.most_saved(self.load) / self.model.step(self.load)


def pays_below(prediction: BytePrediction, strategy: Strategy) -> str:
    """The break-even acceptance of a strategy; empty for direct, the reference."""
    if strategy is DIRECT:
        return ""
    limit = prediction.model.break_even(strategy)
    return NEVER if limit is None else percent(limit)


def launches(prediction: BytePrediction, strategy: Strategy) -> str:
    """Launches per window: `28`, or `1-29` if they depend on how first tokens are written."""
    fewest, most = strategy.launches(len(prediction.model.shape.attending))
    return str(fewest) if fewest == most else f"{fewest}-{most}"


def headline(prediction: BytePrediction) -> str:
    """The answer in one sentence."""
    limit = pays_below(prediction, BY_REFERENCE)
    gain = prediction.model.share(BY_REFERENCE, prediction.load)
    if limit == NEVER:
        by_reference = "staging by reference never pays in bytes"
    else:
        effect = f"saves {percent(gain)}" if gain > 0 else f"costs {percent(-gain)} more"
        if percent(gain) == "0 %":
            effect = "changes nothing"
        by_reference = (
            f"staging by reference pays below {limit} acceptance, "
            f"and at {percent(prediction.load.acceptance)} it {effect}"
        )
    return (
        f"The most that NWOR could save here is {percent(prediction.most_share)} of the step's "
        f"DRAM bytes; {by_reference}."
    )


def _amount(parameters: int) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:,.2f}{word}"
    return f"{parameters:,}"


def setting(prediction: BytePrediction) -> str:
    """A sentence with model, workload and dtypes."""
    shape, load = prediction.model.shape, prediction.load
    ranks = f" Bytes are those of one of {load.ranks} ranks." if load.ranks > 1 else ""
    return (
        f"{prediction.name}: {_amount(shape.parameters())} parameters, {len(shape.layers)} "
        f"layer{'s' * (len(shape.layers) > 1)}. {load.requests} requests x "
        f"{load.draft_tokens} drafts, {load.context:,} tokens "
        f"of context each, {percent(load.acceptance)} of drafts accepted. Cache in "
        f"{prediction.cache_dtype}, weights in {prediction.weight_dtype}.{ranks}"
    )


def step_rows(prediction: BytePrediction) -> list[tuple[str, str, str]]:
    """DRAM bytes of a step of stock vLLM: (what, bytes, share)."""
    model, load = prediction.model, prediction.load
    step = model.step(load)
    parts: tuple[tuple[str, float], ...] = (
        ("weights, read", model.weights_read(load)),
        ("K/V of the context, read", model.context_read(load)),
        ("K/V of each request's first token, written", model.first_tokens_written(load)),
        (f"K/V of {load.staged:,} drafts, written", model.moved(DIRECT, load).total),
        *_if_any("recurrent states, read and written", model.states_moved(load)),
        *_if_any("indexer keys, read and written directly", model.indexer_keys_moved(load)),
        ("total", step),
    )
    return [(what, size(round(amount)), percent(amount / step)) for what, amount in parts]


def _if_any(what: str, amount: float) -> list[tuple[str, float]]:
    return [(what, amount)] if amount else []


STRATEGY_HEADERS = ("drafts' K/V", "read", "written", "saved", "of step", "pays below", "launches")


def strategy_rows(prediction: BytePrediction) -> list[tuple[str, ...]]:
    """One row per strategy, under STRATEGY_HEADERS."""
    rows: list[tuple[str, ...]] = []
    for strategy in STRATEGIES:
        moved = prediction.model.moved(strategy, prediction.load)
        amounts = (size(round(moved.read)), size(round(moved.written)))
        saved = ("", "")
        if strategy is not DIRECT:
            amount = prediction.model.saved(strategy, prediction.load)
            saved = (
                signed_size(amount),
                percent(prediction.model.share(strategy, prediction.load)),
            )
        limit = pays_below(prediction, strategy)
        rows.append((strategy.label, *amounts, *saved, limit, launches(prediction, strategy)))
    return rows


def notes(prediction: BytePrediction) -> list[str]:
    """Assumptions of the prediction, one or two sentences each."""
    model, load = prediction.model, prediction.load
    layers = len(model.shape.attending)
    kept = size(round(load.staged * model.activation_row(load.ranks)))
    lines = [
        "The byte model predicts these numbers; nothing was measured. Activations, logits and the "
        "drafter are left out, so a real step moves more bytes and every share is an upper bound.",
        "If DRAM bandwidth alone limits the step, its time changes by the column 'of step'. "
        "Launches and host time can matter more than these bytes.",
        f"'kept in L2' needs {kept} of staged K/V to stay in the L2 cache until the commit, "
        "while every layer's weights stream through it.",
        f"Launches: the lower number counts the drafts alone; the higher adds the stock write of "
        f"the certain first tokens, one launch in each of {layers} layers.",
    ]
    if model.shape.experts is not None:
        touched = model.shape.experts.expected_distinct(load.tokens)
        lines.append(
            f"Experts: {load.tokens:,} tokens use {touched:.1f} of {model.shape.experts.count} "
            "experts per layer on average, if routing is uniform."
        )
    if model.shape.model_type not in KNOWN_TYPES:
        lines.append(
            f"Model type {model.shape.model_type!r} is read as Llama: compare the parameter count "
            "above with the published one."
        )
    return lines


MODEL_HEADERS = (
    "model",
    "weights and context read",
    "drafts' K/V, stock",
    "most NWOR could save",
    "by reference saves",
    "pays below",
    "launches, stock to by reference",
)

COMPARISON_NOTE = (
    "Predicted by the byte model, not measured; shares of the step's DRAM bytes are upper bounds. "
    "Name a single model to see all details."
)


def model_rows(predictions: Iterable[BytePrediction]) -> list[tuple[str, ...]]:
    """One row per model, under MODEL_HEADERS."""
    rows: list[tuple[str, ...]] = []
    for prediction in predictions:
        model, load = prediction.model, prediction.load
        read = model.weights_read(load) + model.context_read(load)
        rows.append(
            (
                prediction.name,
                size(round(read)),
                size(round(model.moved(DIRECT, load).total)),
                percent(prediction.most_share),
                percent(model.share(BY_REFERENCE, load)),
                pays_below(prediction, BY_REFERENCE),
                f"{launches(prediction, DIRECT)} to {launches(prediction, BY_REFERENCE)}",
            )
        )
    return rows


def csv_rows(prediction: BytePrediction) -> list[dict[str, Any]]:
    """One row per strategy; units are in the names, `predicted_` marks the byte model's numbers."""
    model, load = prediction.model, prediction.load
    common = {
        "model": prediction.name,
        "parameters": model.shape.parameters(),
        "requests": load.requests,
        "context_tokens": load.context,
        "draft_tokens": load.draft_tokens,
        "acceptance_rate": load.acceptance,
        "cache_dtype": prediction.cache_dtype,
        "weight_dtype": prediction.weight_dtype,
        "tensor_parallel_size": load.ranks,
        "staged_tokens": load.staged,
        "accepted_tokens": load.accepted,
        "predicted_step_bytes": model.step(load),
        "predicted_weight_bytes_read": model.weights_read(load),
        "predicted_context_bytes_read": model.context_read(load),
    }
    return [{**common, **_strategy_values(prediction, strategy)} for strategy in STRATEGIES]


def prediction_values(prediction: BytePrediction) -> dict[str, Any]:
    """Everything for JSON: the answer and a row per strategy, with `csv_rows`' names."""
    return {
        "model": prediction.name,
        "headline": headline(prediction),
        "most_saved_share": prediction.most_share,
        "strategies": csv_rows(prediction),
        "recurrent": recurrent_values(prediction.model, prediction.load),
    }


def _strategy_values(prediction: BytePrediction, strategy: Strategy) -> dict[str, Any]:
    model, load = prediction.model, prediction.load
    moved = model.moved(strategy, load)
    fewest, most = strategy.launches(len(model.shape.attending))
    return {
        "strategy": strategy.name,
        "predicted_bytes_read": moved.read,
        "predicted_bytes_written": moved.written,
        "predicted_bytes_saved": model.saved(strategy, load),
        "predicted_share_of_step_saved": model.share(strategy, load),
        "predicted_break_even_acceptance": model.break_even(strategy),
        "launches_fewest": fewest,
        "launches_most": most,
    }


def wrapped(text: str, bullet: str = "") -> str:
    """Text wrapped for a terminal; a number and its per-cent sign stay together."""
    glued = text.replace(" %", "\N{NO-BREAK SPACE}%")
    indent = " " * len(bullet)
    lines = textwrap.fill(glued, WIDTH - 2, initial_indent=bullet, subsequent_indent=indent)
    return lines.replace("\N{NO-BREAK SPACE}", " ")
