"""The questions that follow a report's answer: what makes the difference, how sure, what next."""

from collections.abc import Iterator, Sequence
from math import ceil

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.effects import WINDOWS
from nwor_bench.analysis.findings import nothing_timed, sufficient_budget
from nwor_bench.analysis.parity.required import GATE_DID_NOT
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, EXPLAINED, LOSSY, REFERENCE
from nwor_bench.analysis.verdicts import DEFAULT_MARGIN
from nwor_bench.errors import ExitCode
from nwor_bench.models.measured import measured_rows, outcomes
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, RunStatus, Verdict
from nwor_bench.report.answer import (
    CPU_BADGE,
    UNSTAGED_BADGE,
    Answer,
    answer,
    holds_one,
    on_cpu,
    subject_cells,
    tie_sizes,
    work_differs,
)
from nwor_bench.report.document import Definitions
from nwor_bench.report.evidence import kv_sentence, local_sentence, state_sentence
from nwor_bench.report.precision import split_lines
from nwor_bench.report.text import change_range, joined, percent, plural

_PLAN = "`nwor-bench plan --config FOLDER` (the target's)"
_WORTH_WAITING = 100
"""If more than this many times the blocks were needed, advise a quieter machine instead."""


def questions(analysis: Analysis) -> Definitions:
    """Each question with its answer; without those that do not apply."""
    run, cells = analysis.run, analysis.cells
    headline = answer(run.header, cells, analysis.splits)
    ties = tie_sizes(run.header)
    entries = {
        "What makes the difference?": split_lines(analysis.splits),
        "Does it pay on a GPU?": _elsewhere(run.header),
        "How sure is that?": _how_sure(headline, analysis),
        "Is the output the same?": (
            same_output(cells),
            ties and f"{ties.capitalize()}.",
            local_sentence(run),
            kv_sentence(run),
            state_sentence(run),
        ),
        "What next?": _next(run, headline, cells),
    }
    answers = ((question, " ".join(filter(None, texts))) for question, texts in entries.items())
    return Definitions(tuple((question, text) for question, text in answers if text))


def _elsewhere(header: RunHeader) -> Iterator[str]:
    """What was measured on GPUs, for a run on a CPU that timed nothing."""
    if header.checks_only and on_cpu(header):
        yield (
            f"On an H200 staging was {outcomes(measured_rows())} (the last run of each); the "
            "README has the table. `nwor-bench plan --config FOLDER` names those nearest to a "
            "model."
        )


def same_output(cells: Sequence[CellResult]) -> str:
    """Answer to: did the modes change the model's output, as far as it was checked?"""
    broken = [cell.label for cell in cells if cell.parity == Verdict.INVALID]
    if broken:
        return f"No: {joined(broken)} changed it. Evidence shows the first difference."
    every = [cell for cell in cells if cell.verdict != REFERENCE and cell.arm != AA]
    compared = [cell for cell in every if cell.verdict != Verdict.INEFFECTIVE]
    if not compared:
        return "Not checked: no cell did anything." if every else ""
    unchecked = [cell.label for cell in compared if cell.parity is None]
    if unchecked:
        return f"Not checked for {joined(unchecked)}."
    if all(cell.parity == EXACT for cell in compared):
        names = joined([cell.label for cell in compared])
        return f"Yes: on the gate's prompts {names} gave the same tokens."
    if all(cell.parity in (EXACT, EXPLAINED) for cell in compared):
        return (
            "Yes, except at ties: wherever a cell's token differed, off x off itself cannot tell "
            "the two tokens apart. Evidence lists them."
        )
    if any(cell.parity == LOSSY for cell in compared):
        return "FLy is lossy by design: tokens were not compared, only K/V and layers."
    if any(cell.parity == ACCEPTANCE_ONLY for cell in compared):
        return "Only acceptance by position was compared, because acceptance is synthetic here."
    return "As far as it could be checked; see Evidence."


def _how_sure(headline: Answer, analysis: Analysis) -> Iterator[str]:
    if analysis.run.header.checks_only and headline.badge != Verdict.INVALID:
        return
    if headline.badge == CPU_BADGE:
        yield "Output and counts passed their checks; nothing is known of the speed on a GPU."
        return
    if headline.badge in (Verdict.INEFFECTIVE, UNSTAGED_BADGE):
        yield "Sure that it never ran: the counters show it. Nothing else was timed in the engine."
        return
    if headline.badge == Verdict.INVALID:
        yield "Sure: a wrong output or count is a fact, not noise."
        return
    cell = headline.cell
    if cell is None or cell.ratio is None:
        return
    why = "its interval excludes 1."
    if holds_one(cell):
        why = "the difference passes Holm's correction; its size is less sure."
    yield {
        str(Verdict.AMBIGUOUS): "Not sure enough to say yes or no.",
        str(Verdict.SAME): "Sure that any effect is within the interval above.",
    }.get(headline.badge, f"Sure of the direction: {why}")
    if cell.interleaved == WINDOWS:
        yield f"It rests on {plural(cell.groups or 0, 'group')} of neighbouring windows."
    else:
        yield f"It rests on {plural(cell.batches, 'block')}, each of which ran every cell."
    noise = analysis.noise_floor
    if noise is None:
        yield "The machine's noise is not known: off x off was not run against itself."
        return
    yield (
        "Noise: off x off against itself took "
        f"{change_range(noise['low'], noise['high'])} time (95 % interval)."
    )
    arm = next(cell for cell in analysis.cells if cell.arm == AA)
    if arm.verdict in (Verdict.FASTER, Verdict.SLOWER):
        yield f"But that difference was {arm.verdict}, so be careful: measure once more."


def _next(run: RunData, headline: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    if run.header.status is RunStatus.PARTIAL:
        yield "Finish the run: nwor-bench sweep --resume with its folder."
    yield _next_by_verdict(run, headline, cells)


def _next_by_verdict(run: RunData, headline: Answer, cells: Sequence[CellResult]) -> str:
    header = run.header
    asked, subject = subject_cells(cells)
    match headline.badge:
        case Verdict.INVALID:
            rest = [f"{c.label} ({c.verdict})" for c in asked if c.verdict != Verdict.INVALID]
            passed = f" {joined(rest)} passed, but fix the fault before using them." if rest else ""
            return (
                "Do not switch it on, and use none of its times. Find the first mismatch under "
                f"Evidence, fix or report it, and run again; VLLM_NWOR_DEBUG=1 logs every "
                f"window.{passed}"
            )
        case Verdict.INEFFECTIVE if headline.exit_code is ExitCode.OK:
            return (
                f"Nothing is to be done: {subject} leaves such windows to stock by itself. "
                "--attention ours or merge stages them all the same, to see what that costs."
            )
        case badge if badge in (Verdict.INEFFECTIVE, UNSTAGED_BADGE):
            return "Find the reason under Evidence (fallbacks), fix it, and run again."
        case Verdict.FASTER if headline.cell is not None:
            return (
                "The answer is valid for this load: repeat the run with your own "
                f"{'' if (header.choice or {}).get('target_model') else 'models, '}prompts and "
                "load. If it says the same there, switch it on where you serve: "
                f"{_switched_on(header, headline.cell)}"
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
        case Verdict.AMBIGUOUS if headline.cell and GATE_DID_NOT in (headline.cell.reason or ""):
            return (
                "Find under Evidence what the gate did not compare and why, and run again. Fewer "
                "--requests or a larger kv_cache_gib leave more of the cache in place."
            )
        case Verdict.AMBIGUOUS:
            arm = next((cell for cell in cells if cell.arm == AA), None)
            hidden = headline.cell is not None and work_differs(headline.cell, arm)
            faster_host = "A faster host, or more --requests, would let the step show it. "
            return faster_host * hidden + _measure_longer(headline.cell)
        case _ if on_cpu(header) and header.spec.against:
            return "Run the same command on the GPU that you serve with."
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
    """`vllm serve` with what gives it this cell as it was measured."""
    served = f"vllm serve ... with {cell.arm}" if cell.arm else "vllm serve ..."
    if cell.arm is not None and cell.nwor_mode == "off":
        return served
    variables = {"VLLM_NWOR_MODE": str(cell.nwor_mode), "VLLM_SCV_MODE": str(cell.scv_mode)}
    stage_by, attention = header.spec.stage_by, header.spec.attention
    if cell.nwor_mode == "stage" and stage_by != "reference":
        variables["VLLM_NWOR_STAGE_BY"] = str(stage_by)
    if cell.nwor_mode == "stage" and attention != "auto":
        variables["VLLM_NWOR_ATTENTION"] = str(attention)
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), served])


def _gpu_command(header: RunHeader) -> str:
    """The command that answers on a GPU, with the reader's models if they are known."""
    choice, pair = header.choice or {}, header.pair
    drafter = f"--draft-model {choice.get('draft_model') or 'MODEL'}"
    if pair.draft is None and choice.get("draft_model") is None:
        drafter = f"--method {pair.method}"
    target = choice.get("target_model") or "MODEL"
    return f"nwor-bench sweep --target-model {target} {drafter} --ci-width 0.5%"
