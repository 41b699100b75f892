"""The first screen of a report: does it pay, and the questions that follow the answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.cell_data import EXACT, REFERENCE
from nwor_bench.analysis.effects import WINDOWS, Split
from nwor_bench.analysis.findings.run import nothing_timed, sufficient_budget
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY
from nwor_bench.analysis.statistics import DEFAULT_MARGIN
from nwor_bench.analysis.throughput import ACCEPTANCE, TIME
from nwor_bench.analysis.verdicts import VALUES_NOT_COMPARED
from nwor_bench.models.measured import measured_rows, outcomes
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.header import KvGateFacts, PairFacts, RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, NworMode, RunStatus, Verdict
from nwor_bench.report.document import Callout, Definitions, Headline
from nwor_bench.report.evidence import kv_sentence, local_sentence
from nwor_bench.report.precision import split_lines
from nwor_bench.report.text import (
    change_range,
    compared_time,
    corrected,
    joined,
    percent,
    plural,
    signed,
    sure_bounds,
    sure_rates,
)

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

_PLAN = "`nwor-bench plan --config FOLDER` (the target's)"
_WORTH_WAITING = 100
"""If more than this many times the blocks were needed, advise a quieter machine instead."""


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


def answer(header: RunHeader, cells: Sequence[CellResult], parts: Sequence[Split] = ()) -> Answer:
    """The first that applies: nothing measured, INVALID, only checked, a CPU, never fired, no time
    left to measure, the times' verdict. `parts` are the effects that were split in two."""
    if not cells:
        return Answer(NOTHING_BADGE, "Nothing was measured.")
    invalid = [cell for cell in cells if cell.verdict == Verdict.INVALID]
    asked, subject = subject_cells(cells)
    if invalid:
        return Answer(str(Verdict.INVALID), _invalid(invalid, subject))
    if not asked:
        return Answer(NOTHING_BADGE, "Only off x off ran, so there is nothing to compare.")
    if header.checks_only:
        return _checked(header, cells)
    if on_cpu(header):
        return Answer(
            CPU_BADGE,
            f"This run does not show whether {subject} pays: it ran on a CPU, and measures the "
            f"harness, not {subject}.",
        )
    live = [cell for cell in asked if cell.verdict != Verdict.INEFFECTIVE]
    if not live:
        reasons = "; ".join(dict.fromkeys(cell.reason for cell in asked if cell.reason))
        text = f"{subject} never did anything in this run, so whether it pays is not known"
        return Answer(str(Verdict.INEFFECTIVE), f"{text}{reasons and f': {reasons}'}.")
    not_timed = nothing_timed(header, cells)
    if not_timed is not None:
        return Answer(str(Verdict.AMBIGUOUS), f"{_unknown(subject)}: {not_timed}.", live[0])
    return _timed(live, subject, parts)


def _checked(header: RunHeader, cells: Sequence[CellResult]) -> Answer:
    """What was compared, for a run that times nothing."""
    compared = [cell for cell in cells if cell.verdict != REFERENCE and cell.parity is not None]
    parities = {cell.parity for cell in compared}
    what = ["tokens", "acceptance"]
    badge, start = IDENTICAL_BADGE, "Output identical"
    if not parities <= {EXACT, "explained"}:
        badge, start, what = str(Verdict.CHECKED), "No difference found", ["acceptance"]
    elif parities != {EXACT}:
        badge, start = TIES_BADGE, "Output identical except at ties"
    found = [
        c for c in ((header.kv_gate or KvGateFacts()).cells or {}).values() if c.get("checked")
    ]
    if found:
        least = min(found, key=lambda cell: cell["checked"])
        what.append(f"{least['checked']:,} cache positions in {plural(least['layers'], 'layer')}")
    of = f"{len(compared)} of {plural(len(cells) - 1, 'cell')}"
    sentence = f"{start} in {of}: {joined(what)} equal those of off x off. Nothing was timed"
    return Answer(badge, f"{sentence}: speed needs a GPU." if on_cpu(header) else f"{sentence}.")


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


def _timed(cells: Sequence[CellResult], subject: str, parts: Sequence[Split]) -> Answer:
    """The verdict by times, from the cell with the lowest ratio among those that decide."""
    faster = sorted(_having(Verdict.FASTER, cells), key=holds_one)
    no = f"{subject} does not pay here, it"
    if faster:  # the lowest ratio of those whose interval excludes 1 for all cells at once
        best, text = faster[0], f"{subject} pays here"
    elif found := _having(Verdict.AMBIGUOUS, cells):
        best = found[0]
        if best.ratio_to_off is None:
            why = best.reason or "nothing was compared"
            return Answer(best.verdict, f"{_unknown(subject)}: {why}.", best)
        text = f"this run does not show whether {subject} pays"
    elif found := _having(Verdict.SAME, cells):
        best, text = found[0], f"{no} makes no difference of more than {100 * DEFAULT_MARGIN:g} %"
    else:
        best = _having(Verdict.SLOWER, cells)[0]
        text = f"{no} costs time{' even at its best' if len(cells) > 1 else ''}"
    details = "; ".join(_details(best, parts))
    return Answer(best.verdict, f"{_lead(best)}: {text} ({details}).", best)


def _lead(cell: CellResult) -> str:
    """`+2.9 % tokens/s [2.7, 3.1] with stage x graph`; the time if tokens/s is not known."""
    rate, bounds = cell.tokens_per_s_ratio, sure_rates(cell)
    if rate is None:
        return f"{_time(cell)} with {cell.label}"
    text = f"{signed(rate, bounds, 'tokens/s')} with {cell.label}"
    open_ = bounds is None or bounds[0] <= 1 <= bounds[1]
    if open_ and cell.verdict in (Verdict.FASTER, Verdict.SLOWER):
        text += f", undecided because {_SCATTER[cell.tokens_per_s_noise or TIME]}"
    return text


_SCATTER = {
    ACCEPTANCE: "accepted drafts differ by chance",
    TIME: "the host's times scatter",
}


def _time(cell: CellResult) -> str:
    """`time of a window -2.8 % [-3.0, -2.6]`, with the interval that is valid for the best cell."""
    assert cell.ratio_to_off is not None
    step = compared_time([cell]).replace(" per ", " of a ")
    return f"{step} {signed(cell.ratio_to_off, sure_bounds(cell))}"


def _details(cell: CellResult, parts: Sequence[Split]) -> Iterator[str]:
    """What stands behind the first number, and how sure it is."""
    if cell.tokens_per_s_ratio is not None:
        yield f"TPOT {signed(1 / cell.tokens_per_s_ratio)}"
        yield _time(cell)
    for part in parts:
        if part.cell == cell.cell:
            yield f"attention {signed(part.attention.ratio)}, writes {signed(part.writes.ratio)}"
    if sure_bounds(cell) is not None:
        yield ", ".join(filter(None, ["95 % intervals", corrected(cell)]))
    if cell.verdict in (Verdict.FASTER, Verdict.SLOWER) and holds_one(cell):
        yield "only Holm's correction shows that there is a difference"
    if cell.verdict == Verdict.AMBIGUOUS and cell.reason and not holds_one(cell):
        yield cell.reason.split("; ")[0]
    if cell.parity == ACCEPTANCE_ONLY:
        yield "synthetic acceptance"


def holds_one(cell: CellResult) -> bool:
    """True if the cell's interval for all cells at once contains 1, or there is none."""
    bounds = sure_bounds(cell)
    return bounds is None or bounds[0] <= 1 <= bounds[1]


def _unknown(subject: str) -> str:
    return f"This run does not show whether {subject} pays"


def _having(verdict: Verdict, cells: Sequence[CellResult]) -> list[CellResult]:
    """The cells of a verdict, the lowest ratio first."""
    own = [cell for cell in cells if cell.verdict == verdict]
    return sorted(own, key=lambda cell: (cell.ratio_to_off is None, cell.ratio_to_off or 0.0))


def _is_off(cell: CellResult) -> bool:
    return (cell.nwor_mode, cell.scv_mode) == ("off", "off")


def questions(analysis: Analysis) -> Definitions:
    """Each question with its answer; without those that do not apply."""
    run, cells = analysis.run, analysis.cells
    found = answer(run.header, cells, analysis.splits)
    entries = {
        "What makes the difference?": split_lines(analysis.splits),
        "Does it pay on a GPU?": _elsewhere(run.header),
        "How sure is that?": _how_sure(found, analysis),
        "Is the output the same?": (same_output(cells), local_sentence(run), kv_sentence(run)),
        "What next?": _next(run, found, cells),
    }
    answers = ((question, " ".join(filter(None, texts))) for question, texts in entries.items())
    return Definitions(tuple((question, text) for question, text in answers if text))


def _elsewhere(header: RunHeader) -> Iterator[str]:
    """What was measured on GPUs, for a run on a CPU that timed nothing."""
    if header.checks_only and on_cpu(header):
        yield (
            f"On an H200 staging (stage x graph) was {outcomes(measured_rows())}; the README has "
            "the table. `nwor-bench plan --config FOLDER` names those nearest to a model."
        )


def same_output(cells: Sequence[CellResult]) -> str:
    """Whether the modes changed the model's output, as far as it was checked."""
    compared = [cell for cell in cells if cell.verdict != REFERENCE]
    if not compared:
        return ""
    broken = [cell.label for cell in compared if cell.parity == Verdict.INVALID]
    if broken:
        return f"No: {joined(broken)} changed it. Evidence shows the first difference."
    unchecked = [cell.label for cell in compared if cell.parity is None]
    if unchecked:
        return f"Not checked for {joined(unchecked)}."
    if all(cell.parity == "exact" for cell in compared):
        return "Yes: on the gate's prompts every cell gave the same tokens."
    if all(cell.parity in ("exact", "explained") for cell in compared):
        return (
            "Yes, except at ties: wherever a cell's token differed, off x off itself cannot tell "
            "the two tokens apart. Evidence lists them."
        )
    if any(cell.parity == ACCEPTANCE_ONLY for cell in compared):
        return "Only acceptance by position was compared, because acceptance is synthetic here."
    return "As far as it could be checked; see Evidence."


def _how_sure(found: Answer, analysis: Analysis) -> Iterator[str]:
    if analysis.run.header.checks_only and found.badge != Verdict.INVALID:
        return
    if found.badge == CPU_BADGE:
        yield "Output and counts passed their checks; nothing is known of the speed on a GPU."
        return
    if found.badge == Verdict.INEFFECTIVE:
        yield "Sure that it never ran: the counters show it. Nothing else is known."
        return
    if found.badge == Verdict.INVALID:
        yield "Sure: a wrong output or count is a fact, not noise."
        return
    cell = found.cell
    if cell is None or cell.ratio_to_off is None:
        return
    why = "its interval excludes 1."
    if holds_one(cell):
        why = "the difference passes Holm's correction; its size is less sure."
    yield {
        str(Verdict.AMBIGUOUS): "Not sure enough to say yes or no.",
        str(Verdict.SAME): "Sure that any effect is within the interval above.",
    }.get(found.badge, f"Sure of the direction: {why}")
    if cell.interleaved == WINDOWS:
        yield f"It rests on {plural(cell.groups or 0, 'group')} of neighbouring windows."
    else:
        yield f"It rests on {plural(cell.batches, 'block')}, each of which ran every cell."
    found_noise = analysis.noise_floor
    if found_noise is None:
        yield "The machine's noise is not known: off x off was not run against itself."
        return
    yield (
        "Noise: off x off against itself took "
        f"{change_range(found_noise['low'], found_noise['high'])} time (95 % interval)."
    )
    arm = next(cell for cell in analysis.cells if cell.arm == AA)
    if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
        yield f"But that difference was {arm.verdict}, so be careful: measure once more."


def _next(run: RunData, found: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    if run.header.status is RunStatus.PARTIAL:
        yield "Finish the run: nwor-bench sweep --resume with its folder."
    yield _next_by_verdict(run, found, cells)


def _next_by_verdict(run: RunData, found: Answer, cells: Sequence[CellResult]) -> str:
    header = run.header
    asked, subject = subject_cells(cells)
    match found.badge:
        case Verdict.INVALID:
            rest = [f"{c.label} ({c.verdict})" for c in asked if c.verdict != Verdict.INVALID]
            passed = f" {joined(rest)} passed, but fix the fault before using them." if rest else ""
            return (
                "Do not switch it on, and use none of its times. Find the first mismatch under "
                f"Evidence, fix or report it, and run again; VLLM_NWOR_DEBUG=1 logs every "
                f"window.{passed}"
            )
        case Verdict.INEFFECTIVE:
            return "Find the reason under Evidence (fallbacks), fix it, and run again."
        case Verdict.FASTER if found.cell is not None:
            return (
                "The answer is valid for this load: repeat the run with your own "
                f"{'' if (header.choice or {}).get('target_model') else 'models, '}prompts and "
                "load. If it says the same there, switch it on where you serve: "
                f"{_switched_on(header, found.cell)} vllm serve ..."
            )
        case Verdict.SLOWER | Verdict.SAME:
            return (
                f"Leave {subject} off, which is the default. Other batch sizes, contexts or "
                f"acceptance may give another answer: {_PLAN} predicts which."
            )
        case Verdict.AMBIGUOUS if nothing_timed(header, cells) is not None:
            return (
                f"Run again with --time-budget {sufficient_budget(run, cells)}: warm-up and gate "
                "come first, and measuring gets the rest."
            )
        case Verdict.AMBIGUOUS if found.cell and found.cell.reason == VALUES_NOT_COMPARED:
            return (
                "Find under Evidence why the K/V gate compared nothing, and run again: fewer "
                "--requests or a larger kv_cache_gib leave more of the cache in place."
            )
        case Verdict.AMBIGUOUS:
            return _measure_longer(found.cell)
        case _ if header.checks_only and not on_cpu(header):
            return "Time it: the same command without --batches 0."
        case _ if header.checks_only:
            return (
                "`nwor-bench supports MODEL` shows what would be staged of your model; "
                f"`{_gpu_command(header)}` on the GPU that you serve with times it."
            )
        case _ if on_cpu(header) and cells:
            return (
                f"To learn whether it pays, run {_gpu_command(header)} on the GPU that you serve "
                f"with; more blocks on a CPU do not help. {_PLAN} predicts without a GPU how much "
                "it could save at most."
            )
    return ""


def _measure_longer(cell: CellResult | None) -> str:
    """How many blocks would show an effect of the margin, if the noise stays as it is."""
    effect = None if cell is None else cell.smallest_effect
    if cell is None or effect is None:
        return "Measure longer: --batches with more blocks, or --ci-width 0.5%."
    factor = (effect / DEFAULT_MARGIN) ** 2
    seen = f"Only an effect of {percent(effect, 2)} or more would probably have shown here."
    if factor > _WORTH_WAITING:
        return f"{seen} That is coarse: find out what disturbs the machine first."
    start = f"Leave it off until that is known. {seen} Measure"
    if cell.interleaved == WINDOWS:
        return f"{start} {max(factor, 2):.0f} times as long (--time-budget)."
    blocks = max(ceil(factor * cell.batches), 2 * cell.batches)
    visible = percent(DEFAULT_MARGIN * (cell.batches / blocks * factor) ** 0.5, 2)
    return f"{start} longer: about {blocks:,} blocks (--batches {blocks}) would show {visible}."


def _switched_on(header: RunHeader, cell: CellResult) -> str:
    """The environment variables that give `vllm serve` this cell as it was measured."""
    variables = {"VLLM_NWOR_MODE": str(cell.nwor_mode), "VLLM_SCV_MODE": str(cell.scv_mode)}
    stage_by = (header.spec or {}).get("stage_by")
    if cell.nwor_mode == "stage" and stage_by not in (None, "reference"):
        variables["VLLM_NWOR_STAGE_BY"] = str(stage_by)
    return " ".join(f"{name}={value}" for name, value in variables.items())


def _gpu_command(header: RunHeader) -> str:
    """The command that answers on a GPU, with the reader's models if they are known."""
    choice, pair = header.choice or {}, header.pair or PairFacts()
    drafter = f"--draft-model {choice.get('draft_model') or 'MODEL'}"
    if pair.draft is None and choice.get("draft_model") is None:
        drafter = f"--method {pair.method}"
    target = choice.get("target_model") or "MODEL"
    return f"nwor-bench sweep --target-model {target} {drafter} --ci-width 0.5%"
