"""Recurrent states of a hybrid model: bytes of each way to keep them right. Predicted."""

from dataclasses import replace
from typing import Any

from nwor_bench.models.byte_model import ByteModel, Workload
from nwor_bench.models.recurrent import (
    REPLAY_FUSED,
    STATE_STRATEGIES,
    STOCK,
    RecurrentLayers,
    StateLoad,
    StateStrategy,
    pays_from,
    saved_of_states,
    state_bytes,
)
from nwor_bench.report.document import Block, Bullets, Paragraph, Table, table
from nwor_bench.report.text import plural, signed_size, size
from nwor_bench.report.text import two_digits as percent

STATE_HEADERS = ("recurrent states", "read", "written", "saved", "of step", "pays from k")

MAP_REQUESTS = (1, 8, 64, 512)
MAP_DRAFTS = (1, 2, 3, 4, 5, 8, 16)


def state_blocks(model: ByteModel, load: Workload) -> tuple[Block, ...]:
    """Sentence, ways to keep states right, break-even map, assumptions; () for other models."""
    layers = model.shape.recurrent
    if layers is None:
        return ()
    return (
        Paragraph(state_sentence(layers, model.states(load))),
        table(STATE_HEADERS, _rows(layers, model, load)),
        _map_table(model, load, REPLAY_FUSED),
        Bullets(_notes(layers, load)),
    )


def state_sentence(layers: RecurrentLayers, load: StateLoad) -> str:
    """The size of a request's states, and the bytes that stock vLLM reads and writes of them."""
    one = size(round(layers.state_bytes(load.ranks)))
    stock = state_bytes(layers, STOCK, load)
    saved = saved_of_states(layers, REPLAY_FUSED, load) / stock.total
    drafts, requests = plural(load.draft_tokens, "draft"), plural(load.requests, "request")
    return (
        f"Recurrent states: {layers.count} layers of {layers.state.kind} keep {one} a request in "
        f"{layers.state.state_bits}-bit. Stock vLLM stores one a token: with {drafts} and "
        f"{requests} a step reads {size(round(stock.read))} and writes "
        f"{size(round(stock.written))}. Replaying accepted tokens in the next step would save "
        f"{percent(saved)} of that."
    )


def _rows(layers: RecurrentLayers, model: ByteModel, load: Workload) -> list[tuple[str, ...]]:
    """One row for each way to keep states right."""
    rows: list[tuple[str, ...]] = []
    for strategy in STATE_STRATEGIES:
        moved = state_bytes(layers, strategy, model.states(load))
        saved = saved_of_states(layers, strategy, model.states(load))
        gain = ("", "", "")
        if strategy is not STOCK:
            least = pays_from(layers, strategy, model.states(load))
            pays = "never" if least is None else str(least)
            gain = (signed_size(saved), percent(saved / model.step(load)), pays)
        rows.append((strategy.label, size(round(moved.read)), size(round(moved.written)), *gain))
    return rows


def _shares(
    model: ByteModel, load: Workload, strategy: StateStrategy
) -> dict[tuple[int, int], float]:
    """Savings as fractions of the step's bytes, by drafts a window and requests."""
    layers = model.shape.recurrent
    if layers is None:
        return {}
    found = {}
    for drafts in sorted({*MAP_DRAFTS, load.draft_tokens}):
        for requests in sorted({*MAP_REQUESTS, load.requests}):
            each = replace(load, draft_tokens=drafts, requests=requests)
            saved = saved_of_states(layers, strategy, model.states(each))
            found[drafts, requests] = saved / model.step(each)
    return found


def _map_table(model: ByteModel, load: Workload, strategy: StateStrategy) -> Table:
    """The break-even map: a row for each number of drafts, a column for each of requests."""
    found = _shares(model, load, strategy)
    requests = sorted({number for _, number in found})
    headers = (f"{strategy.label}: of step", *(plural(n, "request") for n in requests))
    rows = [
        (f"k = {drafts}", *(percent(found[drafts, number]) for number in requests))
        for drafts in sorted({drafts for drafts, _ in found})
    ]
    return table(headers, rows)


def _notes(layers: RecurrentLayers, load: Workload) -> tuple[str, ...]:
    reserved = size(round(layers.slot_bytes(load.draft_tokens, load.ranks)))
    return (
        "The plugin stages only attention layers and leaves recurrent layers unchanged: the "
        "numbers show what staging states would save.",
        f"vLLM reserves a state for each of k + 1 tokens: {reserved} a request. 'one state' is a "
        "lower bound: states that wait for acceptance in DRAM cost two states more than stock.",
        "vLLM 0.32 can replay itself: --use-replayssm for Mamba2, and a record of each token for "
        "Kimi K3's KDA. Its default for the others is the first row.",
    )


def recurrent_values(model: ByteModel, load: Workload) -> dict[str, Any] | None:
    """Everything for JSON; None without recurrent layers."""
    layers = model.shape.recurrent
    if layers is None:
        return None
    values = layer_values(layers, model.states(load))
    for row, strategy in zip(values["strategies"], STATE_STRATEGIES, strict=True):
        saved = saved_of_states(layers, strategy, model.states(load))
        row["predicted_share_of_step_saved"] = saved / model.step(load)
    values["map"] = [
        {"draft_tokens": drafts, "requests": requests, "predicted_share_of_step_saved": share}
        for (drafts, requests), share in _shares(model, load, REPLAY_FUSED).items()
    ]
    return values


def layer_values(layers: RecurrentLayers, load: StateLoad) -> dict[str, Any]:
    """For JSON: the states' sizes, and the bytes of each way to keep them right."""
    rows = []
    for strategy in STATE_STRATEGIES:
        moved = state_bytes(layers, strategy, load)
        rows.append(
            {
                "strategy": strategy.name,
                "predicted_bytes_read": moved.read,
                "predicted_bytes_written": moved.written,
                "predicted_bytes_saved": saved_of_states(layers, strategy, load),
                "pays_from_draft_tokens": (
                    None if strategy is STOCK else pays_from(layers, strategy, load)
                ),
            }
        )
    return {
        "kind": layers.state.kind,
        "layers": layers.count,
        "state_bits": layers.state.state_bits,
        "state_bytes_per_request": layers.state_bytes(load.ranks),
        "reserved_bytes_per_request": layers.slot_bytes(load.draft_tokens, load.ranks),
        "strategies": rows,
    }
