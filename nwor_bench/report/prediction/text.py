"""The byte model's predictions in words, tables and rows; nothing here is measured."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10
from typing import Any

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.strategies import BY_REFERENCE, DIRECT, STRATEGIES, Strategy
from nwor_bench.report.text import size

WIDTH = 80

NEVER = "never"

_NOTHING = 1e-9
"""A percentage this small is rounding."""


@dataclass(frozen=True)
class BytePrediction:
    """One model under one workload; the dtypes are names, for people."""

    name: str
    model: ByteModel
    load: Workload
    cache_dtype: str
    weight_dtype: str

    @property
    def most_share(self) -> float:
        """What no strategy can exceed, as a fraction of the step's DRAM bytes."""
        return self.model.most_saved(self.load) / self.model.step(self.load)


def percent(share: float) -> str:
    """A fraction as a percentage with two significant digits: 0.025 %, 12 %, 100 %."""
    value = 100 * share
    if abs(value) < _NOTHING:
        return "0 %"
    decimals = max(0, 1 - floor(log10(abs(value))))
    return f"{value:.{decimals}f} %"


def signed_size(amount: float) -> str:
    """Bytes with a sign when there are fewer than none: -1.8 MB."""
    text = size(round(abs(amount)))
    return f"-{text}" if round(amount) < 0 else text


def pays_below(plan: BytePrediction, strategy: Strategy) -> str:
    """The break-even acceptance of a strategy; empty for direct, which is what it is against."""
    if strategy is DIRECT:
        return ""
    limit = plan.model.break_even(strategy)
    return NEVER if limit is None else percent(limit)


def launches(plan: BytePrediction, strategy: Strategy) -> str:
    """`28`, or `1-29` where it depends on how first tokens are written."""
    fewest, most = strategy.launches(len(plan.model.shape.layers))
    return str(fewest) if fewest == most else f"{fewest}-{most}"


def headline(plan: BytePrediction) -> str:
    """The answer in one sentence."""
    limit = pays_below(plan, BY_REFERENCE)
    gain = plan.model.share(BY_REFERENCE, plan.load)
    if limit == NEVER:
        by_reference = "staging by reference never pays in bytes"
    else:
        effect = f"saves {percent(gain)}" if gain > 0 else f"costs {percent(-gain)} more"
        if percent(gain) == "0 %":
            effect = "changes nothing"
        by_reference = (
            f"staging by reference pays below {limit} acceptance, "
            f"and at {percent(plan.load.acceptance)} it {effect}"
        )
    return (
        f"The most that NWOR could save here is {percent(plan.most_share)} of the step's DRAM "
        f"bytes; {by_reference}."
    )


def _amount(parameters: int) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:,.2f}{word}"
    return f"{parameters:,}"


def setting(plan: BytePrediction) -> str:
    """What was asked: model, workload, types."""
    shape, load = plan.model.shape, plan.load
    ranks = f" Bytes are those of one of {load.ranks} ranks." if load.ranks > 1 else ""
    return (
        f"{plan.name}: {_amount(shape.parameters())} parameters, {len(shape.layers)} "
        f"layer{'s' * (len(shape.layers) > 1)}. {load.requests} requests x "
        f"{load.draft_tokens} drafts, {load.context:,} tokens "
        f"of context each, {percent(load.acceptance)} of drafts accepted. Cache in "
        f"{plan.cache_dtype}, weights in {plan.weight_dtype}.{ranks}"
    )


def step_rows(plan: BytePrediction) -> list[tuple[str, str, str]]:
    """What a step of stock vLLM moves: (what, bytes, share)."""
    model, load = plan.model, plan.load
    step = model.step(load)
    parts = (
        ("weights, read", model.weights_read(load)),
        ("K/V of the context, read", model.context_read(load)),
        ("K/V of each request's first token, written", model.first_tokens_written(load)),
        (f"K/V of {load.staged:,} drafts, written", model.moved(DIRECT, load).total),
        ("together", step),
    )
    return [(what, size(round(amount)), percent(amount / step)) for what, amount in parts]


STRATEGY_HEADERS = ("drafts' K/V", "read", "written", "saved", "of step", "pays below", "launches")


def strategy_rows(plan: BytePrediction) -> list[tuple[str, ...]]:
    """One row a strategy, under STRATEGY_HEADERS."""
    rows: list[tuple[str, ...]] = []
    for strategy in STRATEGIES:
        moved = plan.model.moved(strategy, plan.load)
        amounts = (size(round(moved.read)), size(round(moved.written)))
        saved = ("", "")
        if strategy is not DIRECT:
            amount = plan.model.saved(strategy, plan.load)
            saved = (signed_size(amount), percent(plan.model.share(strategy, plan.load)))
        limit = pays_below(plan, strategy)
        rows.append((strategy.label, *amounts, *saved, limit, launches(plan, strategy)))
    return rows


def notes(plan: BytePrediction) -> list[str]:
    """What the numbers assume, one sentence or two each."""
    model, load = plan.model, plan.load
    layers = len(model.shape.layers)
    kept = size(round(load.staged * model.activation_row(load.ranks)))
    lines = [
        "All of this is predicted by the byte model; nothing was measured. Activations, logits "
        "and the drafter are left out, so a real step moves more bytes and every share of it is "
        "an upper bound.",
        "If DRAM bandwidth alone sets the step's time, that time changes by the column 'of "
        "step'. Launches and host time can weigh more than these bytes.",
        f"'kept in L2' needs {kept} of staged K/V to stay in the L2 cache until the commit, "
        "while every layer's weights stream through it.",
        f"Launches: the fewest count what drafts need; the most add the stock write of each "
        f"request's certain first token, once in each of {layers} layers.",
    ]
    if model.shape.experts is not None:
        touched = model.shape.experts.expected_distinct(load.tokens)
        lines.append(
            f"Experts: {load.tokens:,} tokens touch {touched:.1f} of "
            f"{model.shape.experts.count} in a layer on average, if routing is uniform."
        )
    if model.shape.model_type not in KNOWN_TYPES:
        lines.append(
            f"Model type {model.shape.model_type!r} is read as if it were built like Llama: "
            "compare the parameter count above with the published one."
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
    "Name one model to see all of it."
)


def model_rows(plans: Iterable[BytePrediction]) -> list[tuple[str, ...]]:
    """One row a model, under MODEL_HEADERS."""
    rows: list[tuple[str, ...]] = []
    for plan in plans:
        model, load = plan.model, plan.load
        read = model.weights_read(load) + model.context_read(load)
        rows.append(
            (
                plan.name,
                size(round(read)),
                size(round(model.moved(DIRECT, load).total)),
                percent(plan.most_share),
                percent(model.share(BY_REFERENCE, load)),
                pays_below(plan, BY_REFERENCE),
                f"{launches(plan, DIRECT)} to {launches(plan, BY_REFERENCE)}",
            )
        )
    return rows


def csv_rows(plan: BytePrediction) -> list[dict[str, Any]]:
    """One row a strategy with units in the names; `predicted_` marks what the model computes."""
    model, load = plan.model, plan.load
    common = {
        "model": plan.name,
        "parameters": model.shape.parameters(),
        "requests": load.requests,
        "context_tokens": load.context,
        "draft_tokens": load.draft_tokens,
        "acceptance_rate": load.acceptance,
        "cache_dtype": plan.cache_dtype,
        "weight_dtype": plan.weight_dtype,
        "tensor_parallel_size": load.ranks,
        "staged_tokens": load.staged,
        "accepted_tokens": load.accepted,
        "predicted_step_bytes": model.step(load),
        "predicted_weight_bytes_read": model.weights_read(load),
        "predicted_context_bytes_read": model.context_read(load),
    }
    return [{**common, **_strategy_values(plan, strategy)} for strategy in STRATEGIES]


def _strategy_values(plan: BytePrediction, strategy: Strategy) -> dict[str, Any]:
    model, load = plan.model, plan.load
    moved = model.moved(strategy, load)
    fewest, most = strategy.launches(len(model.shape.layers))
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
    """Text for a terminal; a number and its per-cent sign stay together."""
    glued = text.replace(" %", "\N{NO-BREAK SPACE}%")
    indent = " " * len(bullet)
    lines = textwrap.fill(glued, WIDTH - 2, initial_indent=bullet, subsequent_indent=indent)
    return lines.replace("\N{NO-BREAK SPACE}", " ")
