"""The four questions that everybody asks of a run, answered from its records."""

from collections.abc import Iterator, Sequence
from math import ceil

from nwor_bench.analysis.aggregate import REFERENCE, noise_floor
from nwor_bench.analysis.findings import Severity, findings, nothing_timed, sufficient_budget
from nwor_bench.analysis.interleaved.agreement import WINDOWS
from nwor_bench.analysis.ratio_to_off import VALUES_NOT_COMPARED
from nwor_bench.analysis.significance import DEFAULT_MARGIN
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, RunStatus, Verdict
from nwor_bench.report.document import Definitions
from nwor_bench.report.sections.advice import (
    gpu_command,
    own_models,
    plan_words,
    switched_on,
)
from nwor_bench.report.sections.kv_gate import kv_sentence
from nwor_bench.report.sections.local_gate import local_sentence
from nwor_bench.report.sections.split import split_lines
from nwor_bench.report.sections.verdicts import (
    CPU_BADGE,
    Answer,
    answer,
    holds_one,
    on_cpu,
    subject_cells,
    went_wrong,
)
from nwor_bench.report.text import (
    change,
    change_range,
    compared_time,
    corrected,
    joined,
    label,
    percent,
    plural,
    sure_bounds,
)

_WORTH_WAITING = 100
"""At more times the blocks than this, a quieter machine is the better advice."""


def questions(run: RunData, cells: Sequence[CellResult]) -> Definitions:
    """Does it pay, by how much, how sure is that, is the output the same, what next."""
    found = answer(run.header, cells)
    entries = {
        "Does it pay?": _pays(found, cells),
        "By how much?": _how_much(found, cells),
        "What makes the difference?": " ".join(split_lines(run, cells)),
        "How sure is that?": " ".join(_how_sure(run, found, cells)),
        "Is the output the same?": " ".join(
            part for part in (same_output(cells), local_sentence(run), kv_sentence(run)) if part
        ),
        "What next?": " ".join(_next(run, found, cells)),
    }
    return Definitions(tuple((question, text) for question, text in entries.items() if text))


def same_output(cells: Sequence[CellResult]) -> str:
    """Whether the modes left the model's output alone, as far as it was checked."""
    compared = [cell for cell in cells if cell.verdict != REFERENCE]
    if not compared:
        return ""
    broken = [label(cell) for cell in compared if cell.parity == Verdict.INVALID]
    if broken:
        return f"No: {joined(broken)} changed it. What differed first stands under Parity."
    unchecked = [label(cell) for cell in compared if cell.parity is None]
    if unchecked:
        return f"Not checked for {joined(unchecked)}."
    if all(cell.parity == "exact" for cell in compared):
        return "Yes where it was checked: on the gate's prompts every cell gave the same tokens."
    if all(cell.parity in ("exact", "explained") for cell in compared):
        return (
            "Yes, but for ties: where a cell's token differed, off x off itself cannot tell the "
            "two tokens apart. How many, and how near they were, stands under Parity."
        )
    return "As far as it could be checked; the section Parity tells how far that is."


def _pays(found: Answer, cells: Sequence[CellResult]) -> str:
    if found.badge == Verdict.INVALID:
        asked, _ = subject_cells(cells)
        rest = [f"{label(c)} ({c.verdict})" for c in asked if c.verdict != Verdict.INVALID]
        text = f"Not known: {went_wrong(cells)}, and what does not work right has no speed."
        if not rest:
            return text
        return f"{text} {joined(rest)} passed the checks, but mend the fault before using them."
    if found.cell is not None and found.cell.ratio_to_off is None:
        return "Not known: nothing was compared."
    return {
        str(Verdict.FASTER): "Yes.",
        str(Verdict.SLOWER): "No.",
        str(Verdict.SAME): "No: it changes nothing that matters.",
        str(Verdict.AMBIGUOUS): "Not known: the measurement was not fine enough.",
        str(Verdict.INEFFECTIVE): "Not known: it never ran.",
        CPU_BADGE: "Not known: only a GPU can tell.",
    }.get(found.badge, "Not known.")


def _how_much(found: Answer, cells: Sequence[CellResult]) -> str:
    """The cell that decides, then the others of its kind."""
    if found.cell is None:
        return _no_number(found)
    if found.cell.ratio_to_off is None:
        return f"No number: {found.cell.reason or 'nothing to compare was measured'}."
    asked, _ = subject_cells(cells)
    others = [cell for cell in asked if cell is not found.cell]
    texts = [_effect(found.cell), *(_effect(cell) for cell in others)]
    start = "Not known for sure. " if found.badge == Verdict.AMBIGUOUS else ""
    time = compared_time([found.cell]).replace("window", "verification step (window)")
    return f"{start}In {time}: {'; '.join(texts)}.{_of_all(found.cell)}"


def _of_all(cell: CellResult) -> str:
    """Which intervals these are, where several cells were compared."""
    if not corrected(cell):
        return ""
    return (
        f" These intervals are {corrected(cell)}, so that they hold for the best one too; those "
        "in the tables are each cell's own."
    )


def _no_number(found: Answer) -> str:
    if found.badge == CPU_BADGE:
        return (
            "Not known. The ratios below compare two modes of this harness on a CPU; they do not "
            "carry over to a GPU, in either direction."
        )
    if found.badge == Verdict.INVALID:
        return "No number: what fails the checks of output and counts is not timed."
    if found.badge == Verdict.INEFFECTIVE:
        return "No number: it never ran, so nothing of it was timed."
    return ""


def _effect(cell: CellResult) -> str:
    """`stage x graph 2.1 % less (95 % interval: ...), FASTER`."""
    if cell.ratio_to_off is None:
        return f"{label(cell)} {cell.verdict}, no number"
    interval = ""
    bounds = sure_bounds(cell)
    if bounds is not None:
        interval = f" (95 % interval: {change_range(*bounds)})"
    return f"{label(cell)} takes {change(cell.ratio_to_off)}{interval}, {cell.verdict}"


def _how_sure(run: RunData, found: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    verdict = found.badge
    if verdict == CPU_BADGE:
        yield (
            "The checks of output and counts passed; of the speed on a GPU nothing at all is known."
        )
        return
    if verdict == Verdict.INEFFECTIVE:
        yield "Sure that it never ran: the counters say so. Nothing else is known."
        return
    if verdict == Verdict.INVALID:
        yield "Sure: a wrong output or count is a fact, not a matter of noise."
        return
    cell = found.cell
    if cell is None or cell.ratio_to_off is None:
        return
    why = "the whole interval lies on one side of no difference."
    if holds_one(cell):
        why = "Holm's correction leaves the difference standing; its size is less sure."
    yield {
        str(Verdict.AMBIGUOUS): "Not sure enough to say yes or no.",
        str(Verdict.SAME): "Sure that any effect is within the interval above.",
    }.get(verdict, f"Sure of the direction: {why}")
    if cell.interleaved == WINDOWS:
        yield f"It rests on {plural(cell.groups or 0, 'group')} of neighbouring windows of the same"
    else:
        rests = f"It rests on {plural(cell.batches, 'block')}, each of which ran every cell"
        yield f"{rests} on the same"
    if corrected(cell):
        yield "prompts; intervals of this kind all hold the true values in 19 of 20 runs, whichever"
        yield "cell comes out best."
    else:
        yield "prompts; an interval of this kind holds the true value in 19 of 20 runs."
    yield from _noise(cells)
    yield from _weakened(run, cells)


def _noise(cells: Sequence[CellResult]) -> Iterator[str]:
    found = noise_floor(cells)
    if found is None:
        yield "How noisy the machine was is not known: off x off was not run against itself."
        return
    spread = change_range(found["low"], found["high"])
    yield f"Noise: off x off against itself, where nothing differs: {spread} (95 % interval)."
    arm = next(cell for cell in cells if cell.arm == AA)
    if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
        yield f"That alone was called {arm.verdict}, so be careful: measure once more."


def _weakened(run: RunData, cells: Sequence[CellResult]) -> Iterator[str]:
    counts = {
        severity: sum(finding.severity == severity for finding in findings(run, cells))
        for severity in (Severity.ERROR, Severity.WARNING)
    }
    said = [plural(count, str(severity)) for severity, count in counts.items() if count]
    if said:
        verb = "weakens" if sum(counts.values()) == 1 else "weaken"
        yield f"Under Findings, {joined(said)} {verb} the numbers."


def _next(run: RunData, found: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    if run.header.status is RunStatus.PARTIAL:
        yield "Finish the run: nwor-bench sweep --resume with its folder."
    yield from _next_by_verdict(run, found, cells)


def _next_by_verdict(run: RunData, found: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    header = run.header
    _, subject = subject_cells(cells)
    match found.badge:
        case Verdict.INVALID:
            yield (
                "Do not switch it on, and use none of its times. Look up the first mismatch under "
                "Parity, mend it or report it, and run again (the command is at the end); "
                "VLLM_NWOR_DEBUG=1 logs every window."
            )
        case Verdict.INEFFECTIVE:
            yield "Look up under Fallbacks by reason why it never ran, mend that, and run again."
        case Verdict.FASTER if found.cell is not None:
            yield (
                f"The answer holds for what was measured: repeat the run with your own "
                f"{'' if own_models(header) else 'models, '}prompts and load. If it says the same "
                f"there, switch it on where you serve: {switched_on(header, found.cell)} "
                "vllm serve ..."
            )
        case Verdict.SLOWER | Verdict.SAME:
            yield (
                f"Leave {subject} off, as it is unless switched on. Other batch sizes, contexts or "
                f"acceptance may answer otherwise: {plan_words(header)} predicts where to look."
            )
        case Verdict.AMBIGUOUS if nothing_timed(header, cells) is not None:
            yield (
                f"Run again with --time-budget {sufficient_budget(run, cells)}: warm-up and gate "
                "take their time first, and what is left is measured."
            )
        case Verdict.AMBIGUOUS if found.cell and found.cell.reason == VALUES_NOT_COMPARED:
            yield (
                "Look up under Parity why the K/V gate compared nothing, and run again: fewer "
                "--requests or a larger --kv-cache-gib leave more of the cache in place."
            )
        case Verdict.AMBIGUOUS:
            yield _measure_longer(found.cell)
        case _ if on_cpu(header) and cells:
            yield (
                f"To learn whether it pays, run {gpu_command(header)} on the GPU that you serve "
                f"with. More blocks on a CPU do not tell. {plan_words(header)} predicts without a "
                "GPU what it could save at most."
            )


def _measure_longer(cell: CellResult | None) -> str:
    """How many blocks would show an effect of the margin, if the noise stays as it is."""
    effect = None if cell is None else cell.smallest_effect
    if cell is None or effect is None:
        return "Measure longer: --batches with more blocks, or --ci-width 0.5%."
    factor = (effect / DEFAULT_MARGIN) ** 2
    seen = f"Only an effect of {percent(effect, 2)} or more would probably have shown here."
    if factor > _WORTH_WAITING:
        return f"{seen} That is coarse: find out what disturbs the machine first (see Findings)."
    if cell.interleaved == WINDOWS:
        return (
            f"Leave it off until that is known. {seen} Measure {max(factor, 2):.0f} times as long "
            "(--time-budget)."
        )
    blocks = max(ceil(factor * cell.batches), 2 * cell.batches)
    return (
        f"Leave it off until that is known. {seen} Measure longer: about {blocks:,} blocks "
        f"(--batches {blocks}) would show "
        f"{percent(DEFAULT_MARGIN * (cell.batches / blocks * factor) ** 0.5, 2)}."
    )
