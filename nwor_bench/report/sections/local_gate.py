"""What the local gate found: each target layer checked on its own inputs."""

from collections.abc import Mapping
from typing import Any

from nwor_bench.analysis.parity.kv_verdict import KvVerdict
from nwor_bench.analysis.parity.local_verdict import LOCAL_EVENT
from nwor_bench.records.cell import Cell
from nwor_bench.records.store import RunData
from nwor_bench.report.document import Block, Paragraph, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, joined, plural

_EXPLAINED = (
    "In some windows of each staging cell's gate batch every target layer is checked on its own "
    "inputs. Stock's write of the same K and V must leave the same bits, and no other row of the "
    "cache may change. Attention may differ from stock's by the rounding of one attention, which "
    "stock's own error against a float64 reference shows for each head. Full CUDA graphs are "
    "checked by a second capture that copies each layer's inputs; its output must equal that of "
    "the graph that is timed, bit for bit, if that graph repeats itself."
)


def local_results(run: RunData) -> dict[str, Mapping[str, Any]]:
    """The local gate's last result for each cell, by its label; empty for runs without one."""
    return {
        Cell.from_names(event).label: event
        for event in run.events
        if event.get("event") == LOCAL_EVENT
    }


def local_sentence(run: RunData) -> str:
    """What was checked layer by layer, in a sentence; "" for runs without a local gate."""
    results = local_results(run)
    sound = {n: r for n, r in results.items() if r["verdict"] == KvVerdict.WITHIN}
    broken = [name for name, r in results.items() if r["verdict"] == KvVerdict.BROKEN]
    unchecked = [name for name, r in results.items() if r["verdict"] == KvVerdict.NOT_RUN]
    sentences = []
    if sound:
        first = next(iter(sound.values()))
        windows = sum(result["windows"] for result in sound.values())
        attended = "" if first["attended"] else " Attention is stock's own in all cells."
        sentences.append(
            f"Layer by layer, on the same inputs, {plural(first['layers'], 'layer')} of "
            f"{joined(list(sound))} write what stock writes and attend as stock does, in "
            f"{plural(windows, 'window')}.{attended}"
        )
    if broken:
        sentences.append(f"A layer of {joined(broken)} differs from stock on the same inputs.")
    if unchecked:
        sentences.append(f"Layers of {joined(unchecked)} were not checked one by one.")
    return " ".join(sentences)


def local_blocks(run: RunData) -> list[Block]:
    """The table of the local gate for the section Parity; nothing for runs without one."""
    results = local_results(run)
    if not results:
        return []
    heads = [
        "Cell", "Layers", "What differs", "Windows", "Rows written", "Rejected drafts",
        "Attention's error over allowed", "Time (s)",
    ]  # fmt: skip
    rows = [[name, *_row(result)] for name, result in results.items()]
    caption = "Each layer on its own inputs"
    return [Paragraph(_EXPLAINED), table(heads, rows, numbers_from=3, caption=caption)]


def _row(result: Mapping[str, Any]) -> list[str]:
    near = result["nearest"]
    return [
        result["verdict"],
        result["reason"] or NOT_MEASURED,
        count(result["windows"]),
        count(result["written"]),
        count(result["rejected"]),
        NOT_MEASURED if near is None else decimal(near, 2),
        decimal(result["seconds"], 2),
    ]
