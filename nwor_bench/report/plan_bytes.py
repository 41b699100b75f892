"""The byte model's prediction of one step, as sections and JSON. Nothing is measured."""

from dataclasses import dataclass
from typing import Any

from nwor_bench.models.byte_model import (
    BY_REFERENCE,
    DIRECT,
    ByteModel,
    Workload,
    reserved_states,
)
from nwor_bench.models.config_json import KNOWN_TYPES
from nwor_bench.models.recurrent import STAGED_KINDS, Moved, RecurrentLayers
from nwor_bench.records.state_slots import STATE_SLOTS
from nwor_bench.report.document import Paragraph, Section, Table, table
from nwor_bench.report.text import plural, size
from nwor_bench.report.text import two_digits as percent


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
        attending = len(self.model.shape.attending)
        (stock, _), (least, most) = (s.launches(attending) for s in (DIRECT, BY_REFERENCE))
        states = f" with K/V and {percent(self.states_share)} with recurrent states"
        return (
            f"NWOR saves at most {percent(self.most_share)} of a step's DRAM bytes{where}"
            f"{states if self.states_share else ''}. Launches count for more: stock writes a "
            f"window's K/V with {stock}, NWOR with {least} ({most} if each request's first token "
            "is written apart)."
        )


def bytes_sections(prediction: BytePrediction) -> tuple[Section, ...]:
    """A step's bytes, and recurrent states."""
    states, load = prediction.model.shape.recurrent, prediction.load
    step = Section("One step of stock vLLM", (_step(prediction),))
    return (step,) if states is None else (step, _states_section(prediction.model, states, load))


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
        "recurrent": None if states is None else _state_values(model, states, load),
    }


def _amount(parameters: int) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if parameters >= unit:
            return f"{parameters / unit:,.2f}{word}"
    return f"{parameters:,}"


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


def bytes_notes(prediction: BytePrediction) -> tuple[str, ...]:
    """Assumptions of the prediction, one or two sentences each."""
    shape, load = prediction.model.shape, prediction.load
    lines = [
        "The byte model predicts bytes; nothing was measured. Activations, logits and the drafter "
        "are left out, so a real step moves more bytes and every share is an upper bound.",
        "GPUs: activations and graphs (1 to 3 GiB each) are left out. A step takes at least its "
        "bytes at full bandwidth. NWOR was measured on H100s and H200s only.",
    ]
    if shape.experts is not None:
        touched = shape.experts.expected_distinct(load.tokens)
        lines.append(
            f"Experts: {load.tokens:,} tokens use {touched:.1f} of {shape.experts.count} "
            "experts per layer on average, if routing is uniform."
        )
    if shape.model_type not in KNOWN_TYPES:
        lines.append(
            f"Model type {shape.model_type!r} is read as Llama: compare the parameter count "
            "above with the published one."
        )
    return tuple(lines)


def _states_section(model: ByteModel, states: RecurrentLayers, load: Workload) -> Section:
    """What states are beside K/V, the bytes of a step, and the memory that vLLM reserves."""
    stock = states.moved(load.requests, load.draft_tokens, load.ranks)
    rows = _kv_written(model, load)
    return Section(
        "Recurrent states",
        (
            Paragraph(
                f"{plural(states.count, 'layer')} of {states.state.kind} keep "
                f"{size(round(states.state_bytes(load.ranks)))} a request in "
                f"{states.state.state_bits}-bit. A step of stock vLLM writes "
                f"{size(round(stock.written))} of states and {size(round(rows))} of K/V: K/V are "
                f"{percent(rows / (rows + stock.written))} of these writes."
            ),
            _moved(states, load),
            Paragraph(
                f"vLLM reserves {_reserved(model, states, load, load.draft_tokens + 1)} of states "
                f"a request, {load.draft_tokens + 1} slots a layer; one slot takes "
                f"{_reserved(model, states, load, 1)}. {_one_slot(states, load)}"
            ),
        ),
    )


def _reserved(model: ByteModel, states: RecurrentLayers, load: Workload, slots: int) -> str:
    return size(round(reserved_states(model, states, load, slots)))


def _one_slot(states: RecurrentLayers, load: Workload) -> str:
    """How to get an engine with one slot."""
    switch, ring = f'{{"{STATE_SLOTS}": 1}}', states.ring_bytes(load.draft_tokens, load.ranks)
    if not ring:
        kind = states.state.kind
        limit = f"windows of {load.draft_tokens + 1} tokens" if kind in STAGED_KINDS else kind
        return f"One slot is not built for {limit}."
    return (
        f"For 1 slot write VLLM_NWOR_MODE=stage vllm serve ... --additional-config '{switch}' "
        f"--no-enable-prefix-caching: every window is then staged. "
        f"Its ring of records takes {size(round(ring))} more."
    )


def _ways(states: RecurrentLayers, load: Workload) -> dict[str, Moved]:
    """Bytes of a step: stock's, staged, and staged with rings."""
    ranks, drafts, kind = load.ranks, load.draft_tokens, states.state.kind
    built = "" if kind in STAGED_KINDS else f", not built for {kind}"
    given = load.requests, drafts, load.accepted, ranks
    ways = {
        "stock: a state for each token": states.moved(load.requests, drafts, ranks),
        f"staged: one state a request{built}": states.staged(*given),
    }
    if states.ring_bytes(drafts, ranks):
        ways["staged, 1 slot: when a ring is full"] = states.with_rings(*given)
    return ways


def _kv_written(model: ByteModel, load: Workload) -> float:
    return model.moved(DIRECT, load).written + model.first_tokens_written(load)


def _moved(states: RecurrentLayers, load: Workload) -> Table:
    return table(
        ("states in one step", "read", "written", "both"),
        [
            (way, *(size(round(amount)) for amount in (moved.read, moved.written, moved.total)))
            for way, moved in _ways(states, load).items()
        ],
    )


def _state_values(model: ByteModel, states: RecurrentLayers, load: Workload) -> dict[str, Any]:
    """For JSON: sizes, bytes of a step (stock's, then staged), memory with and without slots for
    drafts."""
    stock, staged, *rings = _ways(states, load).values()
    slots = load.draft_tokens + 1
    reserved = [reserved_states(model, states, load, slot_count) for slot_count in (slots, 1)]
    return {
        "kind": states.state.kind,
        "layers": states.count,
        "state_bits": states.state.state_bits,
        "state_bytes_per_request": states.state_bytes(load.ranks),
        "is_staged": states.state.kind in STAGED_KINDS,
        "predicted_bytes_read": stock.read,
        "predicted_bytes_written": stock.written,
        "predicted_share_of_writes": stock.written / (stock.written + _kv_written(model, load)),
        "predicted_staged_bytes_read": staged.read,
        "predicted_staged_bytes_written": staged.written,
        "reserved_slots_per_request": slots,
        "reserved_bytes_per_request": reserved[0],
        "one_slot_bytes_per_request": reserved[1],
        "predicted_ring_bytes_read": rings[0].read if rings else None,
        "predicted_ring_bytes_written": rings[0].written if rings else None,
        "ring_bytes_per_request": states.ring_bytes(load.draft_tokens, load.ranks),
    }
