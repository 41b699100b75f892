"""The byte model's prediction of one step, as sections and JSON. Nothing is measured."""

from dataclasses import dataclass
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
from nwor_bench.report.document import Section, Table, table
from nwor_bench.report.plan_states import state_values, states_section
from nwor_bench.report.text import plural, signed_size, size
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

    @property
    def size_words(self) -> str:
        """Parameters, layers and dtypes in a sentence."""
        shape = self.model.shape
        return (
            f"{_amount(shape.parameters())} parameters in {plural(len(shape.layers), 'layer')}: "
            f"{size(round(self.model.weights(self.load.ranks)))} of weights in "
            f"{self.weight_dtype}, cache in {self.cache_dtype}."
        )

    def saving_words(self, where: str) -> str:
        """Bytes and launches that NWOR saves, in two sentences."""
        launches = _launches(self, BY_REFERENCE).replace("-", " to ")
        states = f" with K/V and {percent(self.states_share)} with recurrent states"
        return (
            f"NWOR saves at most {percent(self.most_share)} of a step's DRAM bytes{where}"
            f"{states if self.states_share else ''}. Stock's {_launches(self, DIRECT)} writes "
            f"become {launches} launches, which counts for more."
        )

    def notes(self) -> tuple[str, ...]:
        """Assumptions of the prediction, one or two sentences each."""
        return _notes(self)


def bytes_sections(prediction: BytePrediction) -> tuple[Section, ...]:
    """A step's bytes, the strategies, and recurrent states."""
    states = prediction.model.shape.recurrent
    sections = (
        Section("One step of stock vLLM", (_step(prediction),)),
        Section("Ways to keep drafts out of the cache", (_strategies(prediction),)),
    )
    if states is None:
        return sections
    return (*sections, states_section(prediction.model, states, prediction.load))


def bytes_values(prediction: BytePrediction) -> dict[str, Any]:
    """The prediction for JSON."""
    model, load = prediction.model, prediction.load
    states = model.shape.recurrent
    return {
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
        "weight_bytes": model.weights(load.ranks),
        "predicted_step_bytes": model.step(load),
        "predicted_weight_bytes_read": model.weights_read(load),
        "predicted_context_bytes_read": model.context_read(load),
        "most_saved_share": prediction.most_share,
        "states_saved_share": prediction.states_share,
        "strategies": [_strategy_values(prediction, strategy) for strategy in STRATEGIES],
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


def _amount(parameters: int) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:,.2f}{word}"
    return f"{parameters:,}"


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
    fit = "GPUs: activations and graphs (1 to 3 GiB each) are left out; NWOR was measured on H100s "
    fit += "and H200s only."
    kept = size(round(load.staged * model.activation_row(load.ranks)))
    lines = [
        "The byte model predicts these numbers; nothing was measured. Activations, logits and the "
        "drafter are left out, so a real step moves more bytes and every share is an upper bound.",
        "If only DRAM bandwidth limits the step, its time changes by the column 'of step'. "
        "Launches and host time can matter more than these bytes.",
        f"'kept in L2' needs {kept} of staged K/V to stay in the L2 cache until the commit, "
        "while every layer's weights stream through it.",
        f"{fit} A step takes at least its bytes at full bandwidth.",
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
