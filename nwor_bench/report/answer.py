"""The answer of a run: does it pay? One sentence with a badge."""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.cell_data import REFERENCE
from nwor_bench.analysis.findings.run import nothing_timed
from nwor_bench.analysis.statistics import DEFAULT_MARGIN
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import CellResult, NworMode, Verdict
from nwor_bench.report.document import Headline
from nwor_bench.report.text import (
    change,
    change_range,
    compared_time,
    corrected,
    joined,
    sure_bounds,
)

CPU_SENTENCE = "On a CPU these times measure the harness, not NWOR."
CPU_LIMIT = (
    "These timings measure the harness, not NWOR: on a CPU both modes run on a reference "
    "attention backend of nwor-bench's own, because the stock CPU cache cannot be read in part. "
    "Tokens, acceptance and counts are valid; speed does not carry over to a GPU in either "
    "direction."
)

CPU_BADGE = "CPU RUN"
NOTHING_BADGE = "NOTHING COMPARED"


@dataclass(frozen=True)
class Answer:
    """Does it pay? In one sentence, to be read after the badge.

    `badge` is a verdict, or in a few words why there is none; `cell` the one that the sentence
    rests on, if it is one.
    """

    badge: str
    sentence: str
    cell: CellResult | None = None

    @property
    def headline(self) -> Headline:
        """The same as a document's headline."""
        kind = self.badge.lower() if self.badge in set(Verdict) else "none"
        return Headline(self.badge, self.sentence, kind)


def on_cpu(header: RunHeader) -> bool:
    """True if the engine ran on a CPU."""
    return (header.engine or EngineStatus()).device == "cpu"


def answer(header: RunHeader, cells: Sequence[CellResult]) -> Answer:
    """The first that applies: nothing measured, INVALID, a CPU, never fired, no time left to
    measure, the times' verdict."""
    if not cells:
        return Answer(NOTHING_BADGE, "Nothing was measured.")
    invalid = [cell for cell in cells if cell.verdict == Verdict.INVALID]
    asked, subject = subject_cells(cells)
    if invalid:
        return Answer(str(Verdict.INVALID), _invalid(invalid, subject))
    if not asked:
        return Answer(NOTHING_BADGE, "Only off x off ran, so there is nothing to compare.")
    if on_cpu(header):
        return Answer(
            CPU_BADGE,
            f"This run does not show whether {subject} pays: it ran on a CPU, and measures the "
            f"harness, not {subject}.",
        )
    live = [cell for cell in asked if cell.verdict != Verdict.INEFFECTIVE]
    if not live:
        return Answer(str(Verdict.INEFFECTIVE), _never_fired(asked, subject))
    not_timed = nothing_timed(header, cells)
    if not_timed is not None:
        return Answer(str(Verdict.AMBIGUOUS), f"{_unknown(subject)}: {not_timed}.", live[0])
    return _timed(live, subject)


def subject_cells(cells: Sequence[CellResult]) -> tuple[list[CellResult], str]:
    """The cells that the question is about, and what they have switched on.

    Those with NWOR on; in a run without any, those with only SCV on.
    """
    own = [cell for cell in cells if cell.arm is None and cell.verdict != REFERENCE]
    staged = [cell for cell in own if cell.nwor_mode == NworMode.STAGE]
    return (staged, "NWOR") if staged else (own, "SCV")


def _invalid(cells: Sequence[CellResult], subject: str) -> str:
    if any(cell.arm or _is_off(cell) for cell in cells):
        why = "; ".join(f"{cell.label}: {_reason(cell)}" for cell in cells)
        return f"Nothing can be compared, because off x off itself cannot be trusted: {why}."
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_reason(cell), []).append(cell.label)
    why = "; ".join(f"{joined(labels)}: {reason}" for reason, labels in groups.items())
    if len(groups) == 1:  # the settings are named already
        why = _reason(cells[0])
    labels = [cell.label for cell in cells]
    noun = "setting" if len(labels) == 1 else "settings"
    return (
        f"Whether {subject} pays is not known, because the {noun} {joined(labels)} failed "
        f"{'its' if len(labels) == 1 else 'their'} checks: {why}."
    )


def _reason(cell: CellResult) -> str:
    return f"{cell.reason}".rstrip(".")


def _never_fired(cells: Sequence[CellResult], subject: str) -> str:
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.reason))
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"{subject} never did anything in this run, so whether it pays is not known{why}."


def _timed(cells: Sequence[CellResult], subject: str) -> Answer:
    """The verdict by times, from the cell with the lowest ratio among those that decide."""
    faster = sorted(_having(Verdict.FASTER, cells), key=holds_one)
    if faster:  # the lowest ratio of those whose interval excludes 1 for all cells at once
        best = faster[0]
        return Answer(best.verdict, f"Yes, {subject} pays here: {_measured(best)}.", best)
    undecided = _having(Verdict.AMBIGUOUS, cells)
    if undecided:
        best = undecided[0]
        return Answer(best.verdict, _undecided(best, subject), best)
    same = _having(Verdict.SAME, cells)
    if same:
        best = same[0]
        text = (
            f"No, {subject} does not pay here: it makes no difference of more than "
            f"{100 * DEFAULT_MARGIN:g} %; {_measured(best)}."
        )
        return Answer(best.verdict, text, best)
    best = _having(Verdict.SLOWER, cells)[0]
    at_best = "at its best, " if len(cells) > 1 else ""
    text = f"No, {subject} does not pay here, it costs time: {at_best}{_measured(best)}."
    return Answer(best.verdict, text, best)


def _measured(cell: CellResult) -> str:
    """The effect with the interval that is valid for the best of several cells, if it has one."""
    bounds = sure_bounds(cell)
    if bounds is None:
        return _point(cell)
    parts = [f"95 % confidence: {change_range(*bounds)}", corrected(cell)]
    if cell.verdict in (Verdict.FASTER, Verdict.SLOWER) and holds_one(cell):
        parts.append("only Holm's correction shows that there is a difference")
    return f"{_point(cell)} ({', '.join(filter(None, parts))})"


def holds_one(cell: CellResult) -> bool:
    """True if the cell's interval for all cells at once contains 1, or there is none."""
    bounds = sure_bounds(cell)
    return bounds is None or bounds[0] <= 1 <= bounds[1]


def _point(cell: CellResult) -> str:
    """`in the setting stage x graph a verification step took 2.1 % less time on average ...`."""
    assert cell.ratio_to_off is not None
    step = "batch" if compared_time([cell]) == "time per batch" else "verification step"
    return (
        f"in the setting {cell.label} a {step} took {change(cell.ratio_to_off)} time on average "
        "than in off x off"
    )


def _undecided(cell: CellResult, subject: str) -> str:
    start = _unknown(subject)
    if cell.ratio_to_off is None:
        return f"{start}: {cell.reason or 'nothing was compared'}."
    bounds = sure_bounds(cell)
    if bounds is not None and holds_one(cell):
        may_be = f"but it may be {change_range(*bounds)} (95 % confidence)"
        return f"{start}: {_point(cell)}, {', '.join(filter(None, [may_be, corrected(cell)]))}."
    reason = "" if cell.reason is None else f"; {cell.reason.split('; ')[0]}"
    return f"{start}: {_measured(cell)}{reason}."


def _unknown(subject: str) -> str:
    return f"This run does not show whether {subject} pays"


def _having(verdict: Verdict, cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells of a verdict, the lowest ratio first."""
    own = [cell for cell in cells if cell.verdict == verdict]
    return sorted(own, key=lambda cell: (cell.ratio_to_off is None, cell.ratio_to_off or 0.0))


def _is_off(cell: CellResult) -> bool:
    return (cell.nwor_mode, cell.scv_mode) == ("off", "off")
