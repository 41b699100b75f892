"""What the K/V gate found, in a sentence and in a table."""

from collections.abc import Mapping
from typing import Any

from nwor_bench.records.cell import Cell
from nwor_bench.records.header import KvGateFacts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Verdict
from nwor_bench.report.document import Block, Paragraph, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, joined, percent

_NOT_RUN = "not run"
_EXPLAINED = (
    "After each staging cell's gate batch the KV cache is read back: K and V of every target "
    "layer, head and rank, at every position that the cache must hold. They are compared with what "
    "mode off leaves for the same tokens. An error is the distance of one head's row to the "
    "reference as a fraction of the layer's row norm; a cell may be off by a few times as much as "
    "mode off is from itself (decoded against prefilled, and prefilled in two batch shapes)."
)


def kv_results(run: RunData) -> dict[str, Mapping[str, Any]]:
    """The K/V gate's last result for each cell, by its label; empty for runs without one."""
    return {
        Cell.from_names(event).label: event
        for event in run.events
        if event.get("event") == "kv_gate"
    }


def kv_sentence(run: RunData) -> str:
    """How far the cache was compared and with which result; "" for runs without a K/V gate."""
    results = kv_results(run)
    told: dict[str, list[str]] = {}
    for name, result in results.items():
        told.setdefault(_told(result), []).append(name)
    return " ".join(text.format(cells=joined(names)) for text, names in told.items())


def _told(result: Mapping[str, Any]) -> str:
    """What is said of a cell; cells of which the same is said share the sentence."""
    verdict = result["verdict"]
    if verdict == _NOT_RUN:
        return f"The KV cache of {{cells}} was not checked: {_no_braces(result['reason'])}."
    if verdict == Verdict.INVALID:
        return "The KV cache of {cells} is wrong."
    ranks = f" on {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return (
        f"The KV cache of {{cells}} is what mode off leaves, {verdict}: "
        f"{count(result['checked'])} of {count(result['committed'])} positions in "
        f"{result['layers']} layers{ranks} were compared."
    )


def _no_braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def kv_blocks(run: RunData) -> list[Block]:
    """The table of the K/V gate for the section Parity; nothing for runs without one."""
    results = kv_results(run)
    if not results:
        return []
    heads = ["Cell", "K/V", "What differs", "Positions", "Largest error over allowed"]
    rows = [[name, *_row(result)] for name, result in results.items()]
    blocks: list[Block] = [
        Paragraph(_EXPLAINED),
        table(heads, rows, numbers_from=3, caption="What the KV cache held"),
    ]
    facts = run.header.kv_gate
    return [*blocks, Paragraph(_cost(facts))] if facts else blocks


def _row(result: Mapping[str, Any]) -> list[str]:
    finding = result.get("finding") or {}
    allowed = finding.get("allowed")
    near = decimal(finding.get("ratio"), 2) if allowed else NOT_MEASURED
    positions = NOT_MEASURED
    if result["committed"] is not None:
        positions = f"{count(result['checked'])} of {count(result['committed'])}"
    return [result["verdict"], result["reason"] or NOT_MEASURED, positions, near]


def _cost(facts: KvGateFacts) -> str:
    """What the K/V gate took, and how far mode off is from itself."""
    spent, gate = facts.seconds or 0.0, facts.gate_seconds
    share = f" ({percent(spent / gate)})" if gate else ""
    text = f"The K/V gate took {decimal(spent, 2)} s of the gate's {decimal(gate, 2)} s{share}."
    own = (facts.own_errors or {}).get("largest")
    if own is None or facts.multiples is None:
        return text
    return (
        f"{text} Mode off against itself: the largest error of a layer is {own['smallest']:.2g} to "
        f"{own['largest']:.2g}, {facts.multiples['largest']:g} times a layer's own is allowed."
    )
