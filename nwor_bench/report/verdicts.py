"""The sentences that a hurried reader takes away."""

from collections.abc import Sequence
from typing import Any

from nwor_bench.aggregate import REFERENCE, noise_floor
from nwor_bench.paired import LATENCY_MS
from nwor_bench.records import CellResult, Verdict
from nwor_bench.report.text import joined, label
from nwor_bench.stats import DEFAULT_MARGIN

CPU_SENTENCE = "On a CPU these times judge the harness, never NWOR."

_PHRASES = {
    Verdict.FASTER: "faster",
    Verdict.SLOWER: "slower",
    Verdict.SAME: f"the same within {100 * DEFAULT_MARGIN:g} %",
    Verdict.AMBIGUOUS: "too uncertain to call",
    Verdict.INEFFECTIVE: "never fired, so not compared",
}


def on_cpu(header: dict[str, Any]) -> bool:
    """True if the engine ran on a CPU."""
    return (header.get("engine") or {}).get("device") == "cpu"


def verdict_sentence(header: dict[str, Any], cells: Sequence[CellResult]) -> str:
    """Is it correct, does it pay, and how fine was the ruler? A few plain sentences."""
    sentences = [_correctness(cells), _effect(cells), _floor(cells)]
    if on_cpu(header):
        sentences.append(CPU_SENTENCE)
    return " ".join(filter(None, sentences))


def _correctness(cells: Sequence[CellResult]) -> str:
    if not cells:
        return "Nothing was measured."
    invalid = [cell for cell in cells if cell.verdict == Verdict.INVALID]
    if invalid:
        why = "; ".join(f"{label(cell)}: {cell.reason}".rstrip(".") for cell in invalid)
        return f"INVALID, and nothing timed there counts: {why}."
    compared = [cell for cell in cells if cell.verdict != REFERENCE and cell.arm is None]
    unchecked = [label(cell) for cell in compared if cell.parity is None]
    if unchecked:
        return f"Not checked for the same output as off x off: {joined(unchecked)}."
    if not compared:
        return "Only off x off ran, so there is nothing to compare."
    if all(cell.parity == "exact" for cell in compared):
        return "Every cell gave exactly the tokens of off x off in the parity gate."
    return "No cell broke parity with off x off; the parity section tells how far they agree."


def _effect(cells: Sequence[CellResult]) -> str:
    """What became of the time, the cells of one verdict together."""
    groups: dict[str, list[CellResult]] = {}
    for name, phrase in _PHRASES.items():
        for cell in cells:
            if cell.verdict == name and cell.arm is None:
                idle = name == Verdict.AMBIGUOUS and cell.ratio_to_off is None
                groups.setdefault("not compared" if idle else phrase, []).append(cell)
    parts = [
        f"{joined([label(cell) for cell in group])} {phrase}{_range(group)}"
        for phrase, group in groups.items()
    ]
    return f"{_what(cells)} against off x off: {'; '.join(parts)}." if parts else ""


def _what(cells: Sequence[CellResult]) -> str:
    compared = {cell.compared for cell in cells if cell.compared is not None}
    return "Batch latency" if compared == {LATENCY_MS} else "Time per window"


def _floor(cells: Sequence[CellResult]) -> str:
    found = noise_floor(cells)
    if found is None:
        return ""
    low, high = 100 * (found["low"] - 1), 100 * (found["high"] - 1)
    return f"Noise floor: off x off against itself came out at {low:+.2f} % to {high:+.2f} %."


def _range(cells: Sequence[CellResult]) -> str:
    ratios = [cell.ratio_to_off for cell in cells if cell.ratio_to_off is not None]
    if not ratios:
        return ""
    low, high = f"{min(ratios):.3f}", f"{max(ratios):.3f}"
    return f" (ratio {low})" if low == high else f" (ratios {low} to {high})"
