"""`plan`'s section on recurrent states: bytes of a step, stock and staged, and reserved memory."""

from typing import Any

from nwor_bench.models.byte_model import (
    DIRECT,
    ByteModel,
    Workload,
    reserved_states,
)
from nwor_bench.models.recurrent import STAGED_KINDS, Moved, RecurrentLayers
from nwor_bench.records.state_slots import STATE_SLOTS
from nwor_bench.report.document import Paragraph, Section, Table, table
from nwor_bench.report.text import plural, size, two_digits


def states_section(model: ByteModel, states: RecurrentLayers, load: Workload) -> Section:
    """What states are beside K/V, the bytes of a step, and the memory that vLLM reserves."""
    stock, rows = _ways(states, load)[0], _kv_written(model, load)
    return Section(
        "Recurrent states",
        (
            Paragraph(
                f"{plural(states.count, 'layer')} of {states.state.kind} keep "
                f"{size(round(states.state_bytes(load.ranks)))} a request in "
                f"{states.state.state_bits}-bit. A step of stock vLLM writes "
                f"{size(round(stock.written))} of states and {size(round(rows))} of K/V: K/V are "
                f"{two_digits(rows / (rows + stock.written))} of these writes."
            ),
            _moved(states, load),
            Paragraph(
                f"vLLM reserves {_reserved(model, states, load, load.draft_tokens + 1)} of states "
                f"a request, {load.draft_tokens + 1} slots a layer; one slot takes "
                f"{_reserved(model, states, load, 1)}. {_one_slot(states)}"
            ),
        ),
    )


def _reserved(model: ByteModel, states: RecurrentLayers, load: Workload, slots: int) -> str:
    return size(round(reserved_states(model, states, load, slots)))


def _one_slot(states: RecurrentLayers) -> str:
    """How to get an engine with one slot."""
    if states.state.kind not in STAGED_KINDS:
        return f"One slot is not built for {states.state.kind}."
    switch = f'{{"{STATE_SLOTS}": 1}}'
    return (
        f"For 1 slot write VLLM_NWOR_MODE=stage vllm serve ... --additional-config '{switch}' "
        "--no-enable-prefix-caching: every window is then staged."
    )


def _ways(states: RecurrentLayers, load: Workload) -> tuple[Moved, Moved]:
    """Bytes of a step: stock's, and staged."""
    ranks, drafts = load.ranks, load.draft_tokens
    return (
        states.moved(load.requests, drafts, ranks),
        states.staged(load.requests, drafts, load.accepted, ranks),
    )


def _kv_written(model: ByteModel, load: Workload) -> float:
    return model.moved(DIRECT, load).written + model.first_tokens_written(load)


def _moved(states: RecurrentLayers, load: Workload) -> Table:
    kind = states.state.kind
    built = "" if kind in STAGED_KINDS else f", not built for {kind}"
    ways = ("stock: a state for each token", f"staged: one state a request{built}")
    return table(
        ("states in one step", "read", "written", "both"),
        [
            (way, *(size(round(amount)) for amount in (moved.read, moved.written, moved.total)))
            for way, moved in zip(ways, _ways(states, load), strict=True)
        ],
    )


def state_values(model: ByteModel, states: RecurrentLayers, load: Workload) -> dict[str, Any]:
    """For JSON: sizes, bytes of a step (stock's, then staged), memory with and without slots for
    drafts."""
    stock, staged = _ways(states, load)
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
    }
