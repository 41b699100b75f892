"""The byte model's predictions as documents, CSV rows and JSON. Nothing is measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nwor_bench.models.byte_model import (
    BY_REFERENCE,
    DIRECT,
    MAPPED,
    STRATEGIES,
    BreakEvenMap,
    ByteModel,
    Strategy,
    Workload,
    break_even_map,
)
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.report.document import (
    Bullets,
    Definitions,
    Document,
    Figure,
    Headline,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.states import recurrent_values, state_blocks
from nwor_bench.report.text import plural, signed_size, size
from nwor_bench.report.text import two_digits as percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

NEVER = "never"

STRATEGY_HEADERS = ("drafts' K/V", "read", "written", "saved", "of step", "pays below", "launches")
MODEL_HEADERS = (
    "model", "weights and context read", "drafts' K/V, stock", "most NWOR could save",
    "by reference saves", "pays below", "launches, stock to by reference",
)  # fmt: skip

COMPARISON_NOTE = (
    "Predicted by the byte model, not measured; shares of the step's DRAM bytes are upper bounds. "
    "Name a single model to see all details."
)

_SHADES = ("#b4541a", "#f3f1ec", "#1f6fb2")
_INK = "#1c1f23"


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


def plan_document(prediction: BytePrediction) -> Document:
    """One model: the answer, a step's bytes, the strategies, the break-even map, assumptions."""
    states = state_blocks(prediction.model, prediction.load)
    lead = (Headline("", _headline(prediction)), Paragraph(_setting(prediction)))
    sections = (
        Section("Where it pays: acceptance x batch", _map_blocks(prediction)),
        Section("One step of stock vLLM", (_step(prediction),), brief=True),
        Section("Ways to keep drafts out of the cache", (_strategies(prediction),), brief=True),
        *([Section("Recurrent states", states, brief=True)] if states else []),
        Section("What these numbers assume", (Bullets(_notes(prediction)),), brief=True),
    )
    return Document(f"Would NWOR pay? {prediction.name}", lead, sections)


def models_document(predictions: Sequence[BytePrediction]) -> Document:
    """Several models: each one's answer, and a table with one row per model."""
    answers = Definitions(tuple((f"{each.name}:", _headline(each)) for each in predictions))
    lead = (answers, models_table(predictions), Paragraph(COMPARISON_NOTE))
    return Document("Would NWOR pay?", lead)


def models_table(predictions: Sequence[BytePrediction]) -> Table:
    """One row per model."""
    rows = []
    for prediction in predictions:
        model, load = prediction.model, prediction.load
        read = model.weights_read(load) + model.context_read(load)
        rows.append([
            prediction.name,
            size(round(read)),
            size(round(model.moved(DIRECT, load).total)),
            percent(prediction.most_share),
            percent(model.share(BY_REFERENCE, load)),
            _pays_below(prediction, BY_REFERENCE),
            f"{_launches(prediction, DIRECT)} to {_launches(prediction, BY_REFERENCE)}",
        ])  # fmt: skip
    return table(MODEL_HEADERS, rows)


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
        "headline": _headline(prediction),
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


def _headline(prediction: BytePrediction) -> str:
    """The answer in one sentence."""
    limit = _pays_below(prediction, BY_REFERENCE)
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


def _map_blocks(prediction: BytePrediction) -> tuple[Figure, Table]:
    """Acceptance across, requests upwards, one map for each strategy and number of drafts."""
    chart = break_even_map(prediction.model, prediction.load)
    rows = _limit_rows(chart)
    words = "; ".join(f"{row[0]}: saves {row[1]}" for row in rows)
    contexts = (f"at most, {context:,} tokens" for context in chart.contexts)
    limits = table(
        ["drafts' K/V", f"saves (k = {chart.load.draft_tokens})", *contexts], rows, numbers_from=2
    )
    figure = Figure(
        name="break-even",
        caption=(
            f"Predicted saving, % of the step's DRAM bytes, with {chart.load.context:,} tokens of "
            "context a request; k drafts a request. Blue: fewer DRAM bytes than stock vLLM. Brown: "
            "more. Dashed: the acceptance at which both move the same. The circle marks the "
            "workload above. Each map has its own colour scale; its title says its range."
        ),
        alternative=f"Predicted savings over acceptance and requests. {words}",
        draw=lambda canvas: _draw_maps(canvas, chart),
        height=round(126 * len(MAPPED) + 29),
        width=round(137 * len(chart.draft_tokens) + 58),
    )
    return figure, limits


def _limit_rows(chart: BreakEvenMap) -> list[list[str]]:
    """Break-even acceptance of each way of staging, and its largest saving at each context."""
    rows = []
    for strategy in MAPPED:
        limit = chart.model.break_even(strategy)
        maps = (chart.shares(strategy, chart.load.draft_tokens, c) for c in chart.contexts)
        below = NEVER if limit is None else f"below {100 * limit:.0f} % acceptance"
        rows.append([strategy.label, below, *(f"{100 * max(map(max, m)):.2g} %" for m in maps)])
    return rows


def _draw_maps(canvas: "Canvas", chart: BreakEvenMap) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("break-even", _SHADES)
    grid = canvas.subplots(len(MAPPED), len(chart.draft_tokens), squeeze=False, sharex=True,
                           sharey=True)  # fmt: skip
    for strategy, row in zip(MAPPED, grid, strict=True):
        row[0].set_ylabel(f"{strategy.label}\nrequests a step", fontsize=9)
        for drafts, axes in zip(chart.draft_tokens, row, strict=True):
            _draw_map(axes, chart, strategy, drafts, shades)
    for axes in grid[-1]:
        axes.set_xlabel("acceptance, %", fontsize=9)


def _draw_map(
    axes: "Axes", chart: BreakEvenMap, strategy: Strategy, drafts: int, shades: Any
) -> None:
    shares = [[100 * share for share in row]
              for row in chart.shares(strategy, drafts, chart.load.context)]  # fmt: skip
    most = max(abs(share) for row in shares for share in row) or 1.0
    rows, half = chart.requests, 50 / (len(chart.acceptances) - 1)
    axes.imshow(shares, cmap=shades, vmin=-most, vmax=most, origin="lower", aspect="auto",
                extent=(-half, 100 + half, -0.5, len(rows) - 0.5),
                interpolation="nearest")  # fmt: skip
    limit = chart.model.break_even(strategy)
    if limit is not None:
        axes.axvline(100 * limit, color=_INK, ls="--", lw=1.2)
    if drafts == chart.load.draft_tokens:
        axes.plot(100 * chart.load.acceptance, rows.index(chart.load.requests), "o", mfc="none",
                  mec=_INK, mew=1.6, ms=7, clip_on=False)  # fmt: skip
    axes.set_yticks(range(len(rows)), [str(number) for number in rows])
    axes.tick_params(labelsize=9)
    axes.set_title(f"k = {drafts}: {min(map(min, shares)):+.2g} to {max(map(max, shares)):+.2g} %",
                   fontsize=9)  # fmt: skip
