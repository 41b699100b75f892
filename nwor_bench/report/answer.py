"""The first sentence of a report: does it pay?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from nwor_bench.analysis.cell_data import OFF_BY_CHOICE
from nwor_bench.analysis.effects import WORK_MS, Split
from nwor_bench.analysis.findings import nothing_timed
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, EXPLAINED, LOSSY, REFERENCE
from nwor_bench.analysis.throughput import ACCEPTANCE, TIME
from nwor_bench.analysis.verdicts import DEFAULT_MARGIN
from nwor_bench.errors import ExitCode
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import AA, CellResult, NworMode, ScvMode, Verdict
from nwor_bench.report.document import Callout, Headline
from nwor_bench.report.text import (
    compared_time,
    corrected,
    joined,
    plural,
    signed,
    sure_rate,
    sure_ratio,
)
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import ratio_at_once

CPU_SENTENCE = "On a CPU these times measure the harness, not NWOR."
MEASURED_ON_CPU = Callout(
    "Measured on a CPU",
    "These timings measure the harness, not NWOR: on a CPU both modes run on a reference "
    "attention backend of nwor-bench's own, because the stock CPU cache cannot be read in part. "
    "Tokens, acceptance and counts are valid; speed does not carry over to a GPU in either "
    "direction.",
)
CHECKED_ON_CPU = Callout(
    "Checked on a CPU",
    "Both modes ran on a reference attention backend of nwor-bench's own, because the stock CPU "
    "cache cannot be read in part. On a GPU the same gate checks the kernels that run there.",
)

CPU_BADGE = "CPU RUN"
IDENTICAL_BADGE = "OUTPUT IDENTICAL"
TIES_BADGE = "IDENTICAL BUT FOR TIES"
NOTHING_BADGE = "NOTHING COMPARED"
UNSTAGED_BADGE = "NOTHING STAGED"


@dataclass(frozen=True)
class Answer:
    """Does it pay? In one sentence, to be read after the badge.

    `badge` is a verdict, or in a few words why there is none; `cell` the one that the sentence
    rests on, if it is one; `exit_code` the run's, if all of its cells are valid.
    """

    badge: str
    sentence: str
    cell: CellResult | None = None
    exit_code: ExitCode = ExitCode.OK

    @property
    def headline(self) -> Headline:
        """Badge and sentence as a document's headline."""
        kind = self.badge.lower() if self.badge in set(Verdict) else "none"
        return Headline(self.badge, self.sentence, kind)


def on_cpu(header: RunHeader) -> bool:
    """True if the engine ran on a CPU."""
    return header.engine.device == "cpu"


def answer(header: RunHeader, cells: Sequence[CellResult], parts: Sequence[Split] = ()) -> Answer:
    """The first that applies: nothing measured, INVALID, never fired, only checked, a CPU, no time
    left to measure, the times' verdict. `parts` are the effects that were split in two."""
    if not cells:
        return Answer(NOTHING_BADGE, "Nothing was measured.")
    invalid = [cell for cell in cells if cell.verdict == Verdict.INVALID]
    asked, subject = subject_cells(cells)
    if invalid:
        return Answer(str(Verdict.INVALID), _invalid(invalid, subject))
    if not asked:
        code = ExitCode.INCONCLUSIVE if header.checks_only else ExitCode.OK  # times are wanted
        text = "Only off x off ran, so there is nothing to compare."
        return Answer(NOTHING_BADGE, text, exit_code=code)
    live = [cell for cell in asked if cell.verdict != Verdict.INEFFECTIVE]
    if not live:
        return _idle(header, asked, subject)
    if header.checks_only:
        return _checked(header, live, cells)
    if on_cpu(header):
        return Answer(
            CPU_BADGE,
            f"This run does not show whether {subject} pays: it ran on a CPU, and measures the "
            f"harness, not {subject}.",
        )
    not_timed = nothing_timed(header, cells)
    if not_timed is not None:
        return Answer(str(Verdict.AMBIGUOUS), f"{_unknown(subject)}: {not_timed}.", live[0])
    return _timed(live, subject, parts, next((cell for cell in cells if cell.arm == AA), None))


def _idle(header: RunHeader, cells: Sequence[CellResult], subject: str) -> Answer:
    """Why none of the cells that the question is about did anything."""
    if not header.checks_only and any(cell.reason == OFF_BY_CHOICE for cell in cells):
        text = f"{subject} does not pay here, so every window was written as stock does"
        return Answer(str(Verdict.INEFFECTIVE), f"{text}{_timed_at_capture(header)}.")
    unstaged = subject == "NWOR" and not any(cell.nwor_total_staged for cell in cells)
    badge = UNSTAGED_BADGE if unstaged else str(Verdict.INEFFECTIVE)
    unknown = "its output was not checked" if header.checks_only else "whether it pays is not known"
    text = f"{subject} never did anything in this run, so {unknown}: {_reasons(cells)}."
    return Answer(badge, text, exit_code=ExitCode.INCONCLUSIVE)


def _reasons(cells: Sequence[CellResult]) -> str:
    """Why cells never fired or were not compared, each reason once."""
    return "; ".join(dict.fromkeys(_reason(cell) for cell in cells))


def _timed_at_capture(header: RunHeader) -> str:
    """The times of a layer that the choice of stock rests on, longest context; empty without."""
    scenario, graphs = header.scenario or {}, header.engine.cuda_graphs
    size = f"{scenario.get('requests')}x{scenario.get('draft_tokens', 0) + 1}"
    of_shapes = ((graphs and graphs.attention_us) or {}).get(size)
    if not of_shapes:
        return ""
    times = dict(next(iter(of_shapes.values())))
    context, stock = times.pop("context")[-1], times.pop("stock")[-1]
    best = min(times_us[-1] for times_us in times.values())
    return (
        f": a layer's write and attention take stock {stock:.0f} us at {context:,} tokens of "
        f"context, and what stages at least {best:.0f} us"
    )


def _checked(header: RunHeader, live: Sequence[CellResult], cells: Sequence[CellResult]) -> Answer:
    """What was compared in the cells that acted, for a run that times nothing; `live` are those
    that the question is about."""
    acting = [cell for cell in cells if cell.arm != AA and cell.verdict != REFERENCE]
    compared = [cell for cell in acting if cell.verdict == Verdict.CHECKED]
    if not any(cell in compared for cell in live):
        text = f"The output was not checked: {_reasons(live)}."
        return Answer(str(Verdict.AMBIGUOUS), text, live[0], ExitCode.INCONCLUSIVE)
    parities = {cell.parity for cell in compared}
    what = ["tokens", "acceptance"]
    badge = IDENTICAL_BADGE
    if not parities <= {EXACT, EXPLAINED}:
        badge, what = str(Verdict.CHECKED), ["acceptance"]
    elif parities != {EXACT}:
        sizes = tie_sizes(header)
        badge, what = TIES_BADGE, [f"tokens (except at ties{sizes and f': {sizes}'})", "acceptance"]
    by_label = header.kv_gate.cells or {}
    gated = [c for cell in compared if (c := by_label.get(cell.label, {})).get("checked")]
    if gated:
        least = min(gated, key=lambda cell: cell["checked"])
        what.append(f"{least['checked']:,} cache positions in {plural(least['layers'], 'layer')}")
    states = [cell["states"] for cell in gated if (cell.get("states") or {}).get("states")]
    if states:
        fewest = min(states, key=lambda result: result["states"])
        of_requests = plural(fewest["requests"], "request")
        what.append(f"{fewest['states']:,} recurrent states of {of_requests}")
    of = f"{len(compared)} of {plural(len(acting), 'cell')}"
    sentence = f"In {of} {joined(what)} equal those of off x off. "
    left = [cell for cell in acting if cell not in compared]
    if left:
        sentence += f"Not checked: {joined([c.label for c in left])} ({_reasons(left)}). "
    sentence += "Nothing was timed"
    return Answer(badge, f"{sentence}: speed needs a GPU." if on_cpu(header) else f"{sentence}.")


def tie_sizes(header: RunHeader) -> str:
    """The largest gap of a run's ties beside the limit; empty without ties."""
    ties = header.parity.ties
    if not ties or ties.get("largest_gap_nats") is None:
        return ""
    gap, allowed = ties["largest_gap_nats"], ties["allowance_nats"]
    return f"largest gap {gap:.2g} nats, a tie is at most {allowed:.2g}"


def subject_cells(cells: Sequence[CellResult]) -> tuple[list[CellResult], str]:
    """The cells that the question is about, and what they have switched on.

    Those with NWOR on; in a run without any, the second engine, or those with only SCV on.
    """
    acting = [cell for cell in cells if cell.arm != AA and cell.verdict != REFERENCE]
    second = [cell for cell in acting if cell.arm is not None]
    if second:
        return second, second[0].arm or ""
    staged = [cell for cell in acting if cell.nwor_mode == NworMode.STAGE]
    return (staged, "NWOR") if staged else (acting, "SCV")


def _invalid(cells: Sequence[CellResult], subject: str) -> str:
    off = (NworMode.OFF, ScvMode.OFF)
    if any(c.arm in (None, AA) and (c.nwor_mode, c.scv_mode) == off for c in cells):
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


def _timed(
    cells: Sequence[CellResult], subject: str, parts: Sequence[Split], arm: CellResult | None
) -> Answer:
    """The verdict by times, from the cell with the lowest ratio among those that decide.

    If none does, from the lowest work that differs (`work_differs`); `arm` is the A/A arm.
    """
    faster = sorted(_having(Verdict.FASTER, cells), key=holds_one)
    no = f"{subject} does not pay here, it"
    if faster:  # the lowest ratio of those whose interval excludes 1 for all cells at once
        best, text = faster[0], f"{subject} pays here"
    elif ambiguous := _having(Verdict.AMBIGUOUS, cells):
        best = ambiguous[0]
        if best.ratio is None:
            why = best.reason or "nothing was compared"
            return Answer(best.verdict, f"{_unknown(subject)}: {why}.", best)
        text = f"this run does not show whether {subject} pays"
        by_work = [cell for cell in ambiguous if work_differs(cell, arm)]
        if by_work:
            best = min(by_work, key=lambda cell: cell.work.value if cell.work else 1.0)
            text = f"{''.join(_work(best))}; this host hides it"
    elif same := _having(Verdict.SAME, cells):
        best, text = same[0], f"{no} makes no difference of more than {100 * DEFAULT_MARGIN:g} %"
    else:
        best = _having(Verdict.SLOWER, cells)[0]
        text = f"{no} costs time{' even at its best' if len(cells) > 1 else ''}"
    details = "; ".join(detail for detail in _details(best, parts) if detail not in text)
    return Answer(best.verdict, f"{_lead(best)}: {text} ({details}).", best)


def _lead(cell: CellResult) -> str:
    """`+2.9 % tokens/s [2.7, 3.1] with stage x graph`; the time if tokens/s is not known."""
    if cell.rate is None:
        return f"{_time(cell)} with {cell.label}"
    sure = sure_rate(cell)
    text = f"{signed(cell.rate.value, sure, 'tokens/s')} with {cell.label}"
    open_ = sure is None or sure.holds(1)
    if open_ and cell.verdict in (Verdict.FASTER, Verdict.SLOWER):
        text += f", undecided because {_SCATTER[cell.tokens_per_s_noise or TIME]}"
    return text


def work_differs(cell: CellResult, arm: CellResult | None) -> bool:
    """True if the work differs in the interval for all cells at once, and more than in A/A."""
    difference, noise = _sure_work(cell), None if arm is None else _sure_work(arm)
    if difference is None or noise is None or cell.parity is None:
        return False
    return not difference.holds(1) and abs(difference.value - 1) > noise.distance


def _sure_work(cell: CellResult) -> Interval | None:
    """The work's ratio, with the interval that is valid for the best cell."""
    return cell.work and ratio_at_once(cell.work, cell.simultaneous_cells or 1)


def _work(cell: CellResult) -> Iterator[str]:
    """`the GPU's work falls by 1.52 % +- 0.10`; nothing if it was not timed."""
    sure = _sure_work(cell)
    if sure is not None:
        verb, size = "falls" if sure.value < 1 else "grows", 100 * abs(sure.value - 1)
        yield f"the GPU's work {verb} by {size:.2f} % +- {100 * sure.half_width:.2f}"


_SCATTER = {ACCEPTANCE: "accepted drafts differ by chance", TIME: "the host's times scatter"}


def _time(cell: CellResult) -> str:
    """`time of a window -2.8 % [-3.0, -2.6]`, with the interval that is valid for the best cell."""
    assert cell.ratio is not None
    step = compared_time([cell]).replace(" per ", " of a ")
    return f"{step} {signed(cell.ratio.value, sure_ratio(cell))}"


def _details(cell: CellResult, parts: Sequence[Split]) -> Iterator[str]:
    """What stands behind the first number, and how sure it is."""
    if cell.rate is not None:
        yield f"TPOT {signed(1 / cell.rate.value)}"
        yield _time(cell)
    yield from _work(cell)
    for part in parts:
        if part.cell == cell.cell:
            of_work = " of the work" if part.clock == WORK_MS else ""
            attention, writes = signed(part.attention.value), signed(part.writes.value)
            yield f"attention {attention}, writes {writes}{of_work}"
    if sure_ratio(cell) is not None:
        yield ", ".join(filter(None, ["95 % intervals", corrected(cell)]))
    if cell.verdict in (Verdict.FASTER, Verdict.SLOWER) and holds_one(cell):
        yield "only Holm's correction shows that there is a difference"
    if cell.verdict == Verdict.AMBIGUOUS and cell.reason and not holds_one(cell):
        yield cell.reason.split("; ")[0]
    if cell.parity == ACCEPTANCE_ONLY:
        yield "synthetic acceptance"
    if cell.parity == LOSSY:
        yield "lossy by design"


def holds_one(cell: CellResult) -> bool:
    """True if the cell's interval for all cells at once contains 1, or there is none."""
    sure = sure_ratio(cell)
    return sure is None or sure.holds(1)


def _unknown(subject: str) -> str:
    return f"This run does not show whether {subject} pays"


def _having(verdict: Verdict, cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells of a verdict, the lowest ratio first."""
    having = [cell for cell in cells if cell.verdict == verdict]
    return sorted(having, key=lambda cell: cell.ratio.value if cell.ratio else inf)
