"""The first line of a report: does it pay? At most 20 words; `facts` has what it rests on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from nwor_bench.analysis.cell_data import OFF_BY_CHOICE
from nwor_bench.analysis.findings.sample import nothing_timed
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, EXPLAINED, LOSSY, REFERENCE
from nwor_bench.analysis.throughput import ACCEPTANCE, TIME
from nwor_bench.errors import ExitCode
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import AA, CellResult, NworMode, ScvMode, Verdict
from nwor_bench.report.document import Facts, Headline
from nwor_bench.report.text import compared_time, joined, plural, signed, sure_rate, sure_ratio
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.multiple import ratio_at_once

CPU_SENTENCE = "On a CPU these times measure the harness, not NWOR."
CPU_BADGE = "CPU RUN"
IDENTICAL_BADGE = "OUTPUT IDENTICAL"
TIES_BADGE = "IDENTICAL BUT FOR TIES"
NOTHING_BADGE = "NOTHING COMPARED"
FAILED_BADGE = "FAILED"
COLOURED_BADGES = {*Verdict, FAILED_BADGE} - {Verdict.NOT_MEASURED}
UNSTAGED_BADGE = "NOTHING STAGED"

MAX_NAMED = 3
"""A headline counts more cells than these."""


@dataclass(frozen=True)
class Answer:
    """Does it pay? In one sentence, to be read after the badge.

    `badge` is a verdict, or in a few words why there is none; `cell` the one that the sentence
    rests on, if it is one; `exit_code` the run's, if all of its cells are valid; `facts` say why.
    """

    badge: str
    sentence: str
    cell: CellResult | None = None
    exit_code: ExitCode = ExitCode.OK
    facts: Facts = ()

    @property
    def headline(self) -> Headline:
        """Badge and sentence as a document's headline."""
        kind = self.badge.lower() if self.badge in COLOURED_BADGES else "none"
        return Headline(self.badge, self.sentence, kind)


def on_cpu(header: RunHeader) -> bool:
    """True if the engine ran on a CPU."""
    return header.engine.device == "cpu"


def answer(header: RunHeader, cells: Sequence[CellResult]) -> Answer:
    """The first that applies: nothing measured, INVALID, never fired, only checked, a CPU, no time
    left to measure, the times' verdict."""
    if not cells:
        return Answer(NOTHING_BADGE, "Nothing was measured.")
    invalid = [cell for cell in cells if cell.verdict == Verdict.INVALID]
    asked, subject = subject_cells(cells)
    if invalid:
        return _invalid(invalid)
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
        text = f"This run does not show whether {subject} pays: a CPU times the harness."
        return Answer(CPU_BADGE, text)
    unknown = f"Whether {subject} pays is not known"
    not_timed = nothing_timed(header, cells)
    if not_timed is not None:
        text = f"{unknown}: nothing was timed."
        return Answer(str(Verdict.AMBIGUOUS), text, live[0], facts=(("why", not_timed),))
    arm = next((cell for cell in cells if cell.arm == AA), None)
    best = _deciding(live, arm)
    if best.ratio is None:
        facts = (("why", best.reason or "nothing was compared"),)
        return Answer(best.verdict, f"{unknown}.", best, facts=facts)
    return _timed(best, arm, len(live))


def _idle(header: RunHeader, cells: Sequence[CellResult], subject: str) -> Answer:
    """Why none of the cells that the question is about did anything."""
    if not header.checks_only and any(cell.reason == OFF_BY_CHOICE for cell in cells):
        text = f"{subject} does not pay here: every window was written as stock does."
        return Answer(str(Verdict.INEFFECTIVE), text, facts=_timed_at_capture(header))
    unstaged = subject == "NWOR" and not any(cell.nwor_total_staged for cell in cells)
    badge = UNSTAGED_BADGE if unstaged else str(Verdict.INEFFECTIVE)
    unknown = "its output was not checked" if header.checks_only else "whether it pays is not known"
    text = f"{subject} never did anything in this run, so {unknown}."
    return Answer(badge, text, None, ExitCode.INCONCLUSIVE, (("why", _reasons(cells)),))


def _reasons(cells: Sequence[CellResult]) -> str:
    """Why cells never fired or were not compared, each reason once."""
    return "; ".join(dict.fromkeys(_reason(cell) for cell in cells))


def _timed_at_capture(header: RunHeader) -> Facts:
    """The times of a layer that the choice of stock rests on, longest context; empty without."""
    scenario, graphs = header.scenario or {}, header.engine.cuda_graphs
    size = f"{scenario.get('requests')}x{scenario.get('draft_tokens', 0) + 1}"
    of_shapes = ((graphs and graphs.attention_us) or {}).get(size)
    if not of_shapes:
        return ()
    times = dict(next(iter(of_shapes.values())))
    context, stock = times.pop("context")[-1], times.pop("stock")[-1]
    best = min(times_us[-1] for times_us in times.values())
    text = f"a layer's write and attention at {context:,} tokens of context: stock {stock:.0f} us"
    return (("why", f"{text}, what stages at least {best:.0f} us"),)


def _checked(header: RunHeader, live: Sequence[CellResult], cells: Sequence[CellResult]) -> Answer:
    """What was compared in the cells that acted, for a run that times nothing; `live` are those
    that the question is about."""
    acting = acting_cells(cells)
    compared = [cell for cell in acting if cell.verdict == Verdict.CHECKED]
    if not any(cell in compared for cell in live):
        facts = (("why", _reasons(live)),)
        text = "The output was not checked."
        return Answer(str(Verdict.AMBIGUOUS), text, live[0], ExitCode.INCONCLUSIVE, facts)
    parities = {cell.parity for cell in compared}
    badge, what = IDENTICAL_BADGE, "tokens"
    if not parities <= {EXACT, EXPLAINED}:
        badge, what = str(Verdict.CHECKED), "acceptance"
    elif parities != {EXACT}:
        badge, what = TIES_BADGE, "tokens but for ties"
    end = "speed needs a GPU" if on_cpu(header) else "time it without --batches 0"
    of = f"Checked cells ({len(compared)} of {len(acting)})"
    left = [cell for cell in acting if cell not in compared]
    not_checked = f"{joined([c.label for c in left])}: {_reasons(left)}"
    unchecked: Facts = (("unchecked", not_checked),) if left else ()
    return Answer(badge, f"{of} gave off x off's {what}; {end}.", facts=unchecked)


def acting_cells(cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells that are compared with the reference, without A/A."""
    return [cell for cell in cells if cell.arm != AA and cell.verdict != REFERENCE]


def subject_cells(cells: Sequence[CellResult]) -> tuple[list[CellResult], str]:
    """The cells that the question is about, and what they have switched on.

    Those with NWOR on; in a run without any, the second engine, or those with only SCV on.
    """
    acting = acting_cells(cells)
    second = [cell for cell in acting if cell.arm is not None]
    if second:
        return second, second[0].arm or ""
    staged = [cell for cell in acting if cell.nwor_mode == NworMode.STAGE]
    return (staged, "NWOR") if staged else (acting, "SCV")


def _invalid(cells: Sequence[CellResult]) -> Answer:
    off = (NworMode.OFF, ScvMode.OFF)
    groups: dict[str, list[str]] = {}
    for cell in cells:
        groups.setdefault(_reason(cell), []).append(cell.label)
    labels = [cell.label for cell in cells]
    who = joined(labels) if len(labels) <= MAX_NAMED else plural(len(labels), "cell")
    text = f"{who} failed {'its' if len(labels) == 1 else 'their'} checks: use none of these times."
    if any(c.arm in (None, AA) and (c.nwor_mode, c.scv_mode) == off for c in cells):
        text = "Nothing can be compared, because off x off itself failed its checks."
    facts = tuple(("why", f"{joined(own)}: {why}") for why, own in groups.items())
    return Answer(str(Verdict.INVALID), text, facts=facts)


def _reason(cell: CellResult) -> str:
    return f"{cell.reason}".rstrip(".")


def _deciding(cells: Sequence[CellResult], arm: CellResult | None) -> CellResult:
    """The cell with the lowest ratio of the verdict that decides. Of FASTER ones first those whose
    interval excludes 1 for all cells at once, of AMBIGUOUS ones those whose work differs."""
    for verdict in (Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME, Verdict.SLOWER):
        having = [cell for cell in cells if cell.verdict == verdict]
        having.sort(key=lambda cell: cell.ratio.value if cell.ratio else inf)
        if verdict == Verdict.FASTER:
            having.sort(key=holds_one)
        elif verdict == Verdict.AMBIGUOUS:
            having.sort(key=lambda c: c.work.value if c.work and work_differs(c, arm) else inf)
        if having:
            return having[0]
    raise AssertionError("a timed cell has one of these verdicts")


def _timed(best: CellResult, arm: CellResult | None, among: int) -> Answer:
    """The number and how its output was checked; `arm` is the A/A arm, `among` how many cells."""
    end = OUTPUT.get(best.parity or "", "Output not checked.")
    work = sure_work(best)
    if best.verdict == Verdict.AMBIGUOUS and work is not None and work_differs(best, arm):
        end = f"GPU work {signed(work.value)}, hidden by this host."
    which = f"{best.label}{f', best of {among} cells' if among > 1 else ''}"
    beside = "tokens/s not known" if best.rate is None else _time(best)
    facts = [("cell", f"{which}: {beside}"), *_open(best)]
    return Answer(best.verdict, f"{_number(best)}. {end}", best, facts=tuple(facts))


OUTPUT = {
    EXACT: "Output identical.",
    EXPLAINED: "Output identical but for ties.",
    ACCEPTANCE_ONLY: "Output checked; acceptance synthetic.",
    LOSSY: "Tokens not compared: FLy is lossy by design.",
}
"""The end of a headline, by what was compared."""


def _number(cell: CellResult) -> str:
    """`+2.9 % tokens/s (95 %: 2.7 to 3.1)`; the time if tokens/s is not known."""
    if cell.rate is None:
        return _time(cell)
    return signed(cell.rate.value, sure_rate(cell), "tokens/s")


def _open(cell: CellResult) -> Iterator[tuple[str, str]]:
    """Why the number's interval or its verdict is open."""
    sure, decided = sure_rate(cell), cell.verdict in (Verdict.FASTER, Verdict.SLOWER)
    if decided and cell.rate is not None and (sure is None or sure.holds(1)):
        yield "why", f"tokens/s are undecided: {_SCATTER[cell.tokens_per_s_noise or TIME]}"
    if decided and holds_one(cell):
        yield "why", "only Holm's correction shows that there is a difference"
    if cell.verdict == Verdict.AMBIGUOUS and cell.reason:
        yield "why", cell.reason.split("; ")[0]


def work_differs(cell: CellResult, arm: CellResult | None) -> bool:
    """True if the work differs in the interval for all cells at once, and more than in A/A."""
    difference, noise = sure_work(cell), None if arm is None else sure_work(arm)
    if difference is None or noise is None or cell.parity is None:
        return False
    return not difference.holds(1) and abs(difference.value - 1) > noise.distance


def sure_work(cell: CellResult) -> Interval | None:
    """The work's ratio, with the interval that is valid for the best cell."""
    return cell.work and ratio_at_once(cell.work, cell.simultaneous_cells or 1)


_SCATTER = {ACCEPTANCE: "accepted drafts differ by chance", TIME: "the host's times scatter"}


def _time(cell: CellResult) -> str:
    """`time of a window -2.8 % (95 %: -3.0 to -2.6)`, valid for the best cell."""
    assert cell.ratio is not None
    step = compared_time([cell]).replace(" per ", " of a ")
    return f"{step} {signed(cell.ratio.value, sure_ratio(cell))}"


def holds_one(cell: CellResult) -> bool:
    """True if the cell's interval for all cells at once contains 1, or there is none."""
    sure = sure_ratio(cell)
    return sure is None or sure.holds(1)
