"""The byte model's predictions as documents and JSON. Nothing is measured."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nwor_bench.models.byte_model import (
    BY_REFERENCE,
    DIRECT,
    STRATEGIES,
    ByteModel,
    Strategy,
    Workload,
)
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.measured import MeasuredRow, nearest_rows
from nwor_bench.report.document import Bullets, Document, Headline, Paragraph, Section, Table, table
from nwor_bench.report.plan_states import state_values, states_section
from nwor_bench.report.text import count, plural, signed_size, size
from nwor_bench.report.text import two_digits as percent

NEVER = "never"

STRATEGY_HEADERS = ("drafts' K/V", "read", "written", "saved", "of step", "pays below", "launches")


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
        """The most that leaving out K/V can save, as a fraction of the step's DRAM bytes."""
        return self.model.most_saved(self.load) / self.model.step(self.load)

    @property
    def states_share(self) -> float:
        """What staging recurrent states saves, as a fraction of the step's DRAM bytes."""
        return self.model.states_saved(self.load) / self.model.step(self.load)


def plan_document(prediction: BytePrediction) -> Document:
    """One model: the answer beside the nearest measured settings, a step's bytes, the strategies,
    recurrent states, assumptions."""
    states, load = prediction.model.shape.recurrent, prediction.load
    lead = (
        Headline("", _headline(prediction)),
        Paragraph(_setting(prediction)),
        _measured(_nearest(prediction)),
    )
    sections = (
        Section("One step of stock vLLM", (_step(prediction),)),
        Section("Ways to keep drafts out of the cache", (_strategies(prediction),)),
        *([] if states is None else [states_section(prediction.model, states, load)]),
        Section("What these numbers assume", (Bullets(_notes(prediction)),)),
    )
    return Document(f"Would NWOR pay? {prediction.name}", lead, sections)


def _measured(rows: Sequence[MeasuredRow]) -> Table:
    """What staging did to the time of a window in the nearest settings."""
    return table(
        ["Model", "Requests", "Context", "Cache", "Time over stock [95 % interval]", "Verdict"],
        [
            [row.model, count(row.requests), count(row.context), row.cache,
             "" if row.ratio is None else f"{row.ratio:.3f} [{row.low:.3f}, {row.high:.3f}]",
             row.verdict]
            for row in rows
        ],
        numbers_from=1,
        caption="Nearest settings measured on an H200, staged, 4 drafts",
    )  # fmt: skip


def prediction_values(prediction: BytePrediction) -> dict[str, Any]:
    """Everything for JSON; units are in the names, `predicted_` marks the byte model's numbers."""
    model, load = prediction.model, prediction.load
    states = model.shape.recurrent
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
    return {
        "model": prediction.name,
        "headline": _headline(prediction),
        "measured": [asdict(row) for row in _nearest(prediction)],
        "most_saved_share": prediction.most_share,
        "states_saved_share": prediction.states_share,
        "strategies": [common | _strategy_values(prediction, strategy) for strategy in STRATEGIES],
        "recurrent": None if states is None else state_values(model, states, load),
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


def _headline(prediction: BytePrediction) -> str:
    """The answer in one sentence."""
    rows = _nearest(prediction)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    measured = f"{min(ratios):.3f} to {max(ratios):.3f} times" if ratios else "written as stock, in"
    launches = _launches(prediction, BY_REFERENCE).replace("-", " to ")
    states = prediction.states_share
    more = f" with K/V and {percent(states)} with recurrent states" if states else ""
    return (
        f"In bytes: NWOR saves at most {percent(prediction.most_share)} of a step's DRAM bytes"
        f"{more}. In launches: stock's {_launches(prediction, DIRECT)} writes become {launches}, "
        f"which counts for more. Measured in the nearest settings: {measured} stock's time of a "
        "window."
    )


def _nearest(prediction: BytePrediction) -> tuple[MeasuredRow, ...]:
    load = prediction.load
    return nearest_rows(prediction.model.shape, load.requests, load.context)


def _amount(parameters: int) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:,.2f}{word}"
    return f"{parameters:,}"


def _setting(prediction: BytePrediction) -> str:
    """A sentence with model, workload and dtypes."""
    shape, load = prediction.model.shape, prediction.load
    ranks = f" Bytes are those of one of {load.ranks} ranks." if load.ranks > 1 else ""
    return (
        f"{prediction.name}: {_amount(shape.parameters())} parameters, "
        f"{plural(len(shape.layers), 'layer')}. {load.requests} requests x "
        f"{load.draft_tokens} drafts, {load.context:,} tokens "
        f"of context each, {percent(load.acceptance)} of drafts accepted. Cache in "
        f"{prediction.cache_dtype}, weights in {prediction.weight_dtype}.{ranks}"
    )


def _pays_below(prediction: BytePrediction, strategy: Strategy) -> str:
    """The break-even acceptance of a strategy; empty for direct, the reference."""
    if strategy is DIRECT:
        return ""
    limit = prediction.model.break_even(strategy)
    return NEVER if limit is None else percent(limit)


def _launches(prediction: BytePrediction, strategy: Strategy) -> str:
    """Launches per window: `28`, or `1-29` depending on how first tokens are written."""
    fewest, most = strategy.launches(len(prediction.model.shape.attending))
    return str(fewest) if fewest == most else f"{fewest}-{most}"


def _step(prediction: BytePrediction) -> Table:
    """DRAM bytes of a step of stock vLLM."""
    model, load = prediction.model, prediction.load
    step = model.step(load)
    parts = {
        "weights, read": model.weights_read(load),
        "K/V of the context, read": model.context_read(load),
        "K/V of each request's first token, written": model.first_tokens_written(load),
        f"K/V of {load.staged:,} drafts, written": model.moved(DIRECT, load).total,
    }
    if model.states_moved(load):
        parts["recurrent states, read and written"] = model.states_moved(load)
    if model.indexer_keys_moved(load):
        parts["indexer keys, read and written directly"] = model.indexer_keys_moved(load)
    rows = [
        (what, size(round(amount)), percent(amount / step))
        for what, amount in {**parts, "total": step}.items()
    ]
    return table(("DRAM bytes of one step", "predicted", "share"), rows)


def _strategies(prediction: BytePrediction) -> Table:
    """One row per strategy."""
    rows = []
    for strategy in STRATEGIES:
        moved = prediction.model.moved(strategy, prediction.load)
        saved = ("", "")
        if strategy is not DIRECT:
            saved = (
                signed_size(prediction.model.saved(strategy, prediction.load)),
                percent(prediction.model.share(strategy, prediction.load)),
            )
        rows.append((strategy.label, size(round(moved.read)), size(round(moved.written)), *saved,
                     _pays_below(prediction, strategy),
                     _launches(prediction, strategy)))  # fmt: skip
    return table(STRATEGY_HEADERS, rows)


def _notes(prediction: BytePrediction) -> tuple[str, ...]:
    """Assumptions of the prediction, one or two sentences each."""
    model, load = prediction.model, prediction.load
    layers = len(model.shape.attending)
    kept = size(round(load.staged * model.activation_row(load.ranks)))
    lines = [
        "The byte model predicts these numbers; nothing was measured. Activations, logits and the "
        "drafter are left out, so a real step moves more bytes and every share is an upper bound.",
        "If only DRAM bandwidth limits the step, its time changes by the column 'of step'. "
        "Launches and host time can matter more than these bytes.",
        f"'kept in L2' needs {kept} of staged K/V to stay in the L2 cache until the commit, "
        "while every layer's weights stream through it.",
        f"Launches: the lower number counts only the drafts; the higher adds the stock write of "
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
    return tuple(lines)
