"""What a run's answer rests on, one fact a line, and what to do next."""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from math import ceil

from nwor_bench.analysis.analyse import Analysis, acceptance_changes
from nwor_bench.analysis.effects import WINDOWS, WORK_MS
from nwor_bench.analysis.findings.finding import Severity
from nwor_bench.analysis.findings.sample import nothing_timed, sufficient_budget
from nwor_bench.analysis.findings.table import grouped
from nwor_bench.analysis.parity.kv import KV_EVENT, KvVerdict
from nwor_bench.analysis.parity.local import FOR_COPIES
from nwor_bench.analysis.parity.required import GATE_DID_NOT
from nwor_bench.analysis.parity.tokens import ACCEPTANCE_ONLY, EXACT, EXPLAINED, LOSSY
from nwor_bench.analysis.verdicts import DEFAULT_MARGIN
from nwor_bench.errors import ExitCode
from nwor_bench.models.measured import measured_rows, outcomes
from nwor_bench.records.header import RunHeader
from nwor_bench.records.store import RunData
from nwor_bench.records.types import AA, CellResult, RunStatus, Verdict
from nwor_bench.report.answer import (
    UNSTAGED_BADGE,
    Answer,
    acting_cells,
    answer,
    on_cpu,
    subject_cells,
    sure_work,
    work_differs,
)
from nwor_bench.report.document import Definitions
from nwor_bench.report.evidence import gate_results
from nwor_bench.report.text import interval, joined, percent, plural, signed, with_bounds

PLAN = "nwor-bench plan FOLDER"
_WORTH_WAITING = 100
"""If more than this many times the blocks were needed, advise a quieter machine instead."""


def facts(analysis: Analysis) -> Definitions:
    """The facts behind an answer; without those that do not apply."""
    run, cells = analysis.run, analysis.cells
    reply = answer(run.header, cells)
    entries = (
        told_of(run.header, plural((run.header.scenario or {}).get("requests", 0), "request")),
        *reply.facts,
        ("output", _output(run, cells)),
        *_second_engine(analysis),
        *(() if reply.cell is None else _behind(reply.cell, analysis)),
        ("on GPUs", _elsewhere(run.header)),
    )
    return Definitions((*((term, text) for term, text in entries if text), *warned([analysis])))


def told_of(header: RunHeader, requests: str) -> tuple[str, str]:
    """Models, scenario, requests and device of a run, where they are known."""
    gpus = [gpu.name for gpu in header.environment.gpus or ()][:1] or [header.engine.device]
    parts = [header.pair.name, (header.scenario or {}).get("name"), requests]
    return "run", ", ".join(str(part) for part in (*parts, *gpus) if part)


def _behind(cell: CellResult, analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Where the number of `cell` comes from, and the machine's noise."""
    parts = [part for part in analysis.splits if part.cell == cell.cell]
    split = "".join(
        f"attention {signed(part.attention.value)}, writes {signed(part.writes.value)}"
        for part in parts
    )
    work = sure_work(cell)
    if work is not None:
        split = split if any(part.clock == WORK_MS for part in parts) else ""
        yield "GPU work", f"{signed(work.value, work)}{split and f': {split}'}"
    else:
        yield "from", split
    if cell.ratio is None:
        return
    groups, blocks = plural(cell.groups or 0, "group"), plural(cell.batches, "block")
    rests = f"{groups} of windows" if cell.interleaved == WINDOWS else blocks
    arm = next((each for each in analysis.cells if each.arm == AA), None)
    noise = "not known, because off x off was not run against itself"
    if arm is not None and arm.ratio is not None:
        noise = f"off x off over itself {interval(arm.ratio)}"
    yield "noise", f"{noise}; {rests}"


def _second_engine(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Tokens per second of an engine that differs, and by position how its acceptance does."""
    data = {data.cell: data for data in analysis.gathered}
    baseline = next((own for own in data.values() if own.is_baseline), None)
    if baseline is None:
        return
    for cell in (c for c in analysis.cells if c.arm not in (None, AA) and c.cell.drafts is None):
        if cell.rate is not None:
            yield "tokens/s", f"{interval(cell.rate)} times off x off's, in windows with drafts"
        changes = acceptance_changes(data[cell.cell], baseline)
        ends = [(100 * c.value, 100 * c.low, 100 * c.high) for c in changes if c.is_bounded]
        told = [f"draft {n} {with_bounds(*each, 1)}" for n, each in enumerate(ends, start=1)]
        if any(map(any, ends)):
            yield "accepted", f"percentage points over off x off's: {', '.join(told)}"
        elif told:
            yield "accepted", "as many drafts as in off x off, at every position"


def warned(analyses: Sequence[Analysis]) -> Iterator[tuple[str, str]]:
    """The strongest warning, and how many more there are."""
    every = [finding for analysis in analyses for finding in analysis.findings]
    groups = [group for group in grouped(every) if group.severity != Severity.NOTE]
    if groups:
        more = f" (and {len(groups) - 1} more)" if len(groups) > 1 else ""
        yield str(groups[0].severity), f"{groups[0].line}{more}"


def _elsewhere(header: RunHeader) -> str:
    """What was measured on GPUs, for a run on a CPU that timed nothing."""
    if header.checks_only and on_cpu(header):
        return f"on an H200 staging was {outcomes(measured_rows())} (the last run of each)"
    return ""


def _output(run: RunData, cells: Sequence[CellResult]) -> str:
    """How the output was checked, and how far."""
    broken = [cell.label for cell in cells if cell.parity == Verdict.INVALID]
    if broken:
        return f"changed by {joined(broken)}: Evidence shows the first difference"
    every = acting_cells(cells)
    compared = [cell for cell in every if cell.verdict != Verdict.INEFFECTIVE]
    if not compared:
        return "not checked: no cell did anything" if every else ""
    unchecked = [cell.label for cell in compared if cell.parity is None]
    if unchecked:
        return f"not checked for {joined(unchecked)}"
    parities = {cell.parity for cell in compared}
    what = "acceptance is off x off's" if ACCEPTANCE_ONLY in parities else "checked"
    if parities == {EXACT}:
        what = "tokens are off x off's on the gate's prompts"
    elif parities <= {EXACT, EXPLAINED}:
        what = f"tokens are off x off's but for ties{_tie_sizes(run.header)}"
    elif LOSSY in parities:
        what = "tokens were not compared: FLy is lossy by design"
    return "; ".join([what, *_values(run, compared)])


def _values(run: RunData, compared: Sequence[CellResult]) -> Iterator[str]:
    """The least that was compared of the cache and of recurrent states in any of these cells, and
    cells in which nothing was."""
    found = gate_results(run, KV_EVENT)
    gated = {cell.label: found[cell.label] for cell in compared if cell.label in found}
    for verdict, text in ((KvVerdict.BROKEN, "is wrong"), (KvVerdict.NOT_RUN, "was not compared")):
        having = [label for label, result in gated.items() if result["verdict"] == verdict]
        if having:
            yield f"the K/V cache of {joined(having)} {text}"
    checked = [result for result in gated.values() if result.get("checked")]
    if checked:
        least = min(checked, key=lambda result: result["checked"])
        yield f"{least['checked']:,} cache positions in {plural(least['layers'], 'layer')}"
    states = [result["states"] for result in checked if (result.get("states") or {}).get("states")]
    if states:
        fewest = min(states, key=lambda result: result["states"])
        yield f"{fewest['states']:,} recurrent states of {plural(fewest['requests'], 'request')}"


def _tie_sizes(header: RunHeader) -> str:
    """The largest gap of a run's ties beside the limit; empty without ties."""
    ties = header.parity.ties
    if not ties or ties.get("largest_gap_nats") is None:
        return ""
    gap, allowed = ties["largest_gap_nats"], ties["allowance_nats"]
    return f" (largest gap {gap:.2g} nats, at most {allowed:.2g})"


def next_steps(analysis: Analysis) -> Definitions:
    """What to do next, as commands where there are some."""
    run, cells = analysis.run, analysis.cells
    steps = _next(run, answer(run.header, cells), cells)
    return Definitions(tuple(zip(chain(["next"], repeat("then")), steps, strict=False)))


def _next(run: RunData, reply: Answer, cells: Sequence[CellResult]) -> Iterator[str]:
    if run.header.status is RunStatus.PARTIAL:
        yield "finish the run: nwor-bench sweep --resume with its folder"
    header = run.header
    asked, subject = subject_cells(cells)
    match reply.badge:
        case Verdict.INVALID:
            rest = [c.label for c in asked if c.verdict != Verdict.INVALID]
            passed = f"; {joined(rest)} passed, but fix the fault first" if rest else ""
            yield f"do not switch it on; VLLM_NWOR_DEBUG=1 logs every window{passed}"
        case Verdict.INEFFECTIVE if reply.exit_code is ExitCode.OK:
            yield f"nothing: {subject} leaves such windows to stock by itself"
        case badge if badge in (Verdict.INEFFECTIVE, UNSTAGED_BADGE):
            yield "find the reason under Evidence (fallbacks), fix it, and run again"
        case Verdict.FASTER if reply.cell is not None:
            own = "" if (header.choice or {}).get("target_model") else "models, "
            yield f"repeat it with your own {own}prompts (--prompts FILE) and load"
            yield f"if it says the same: {_switched_on(header, reply.cell)}"
        case Verdict.SLOWER | Verdict.SAME:
            yield f"leave {subject} off, which is the default"
            yield f"other batch sizes, contexts or acceptance: {PLAN} predicts them"
        case Verdict.AMBIGUOUS if nothing_timed(header, cells) is not None:
            yield f"run again with --time-budget {sufficient_budget(run, cells)}"
        case Verdict.AMBIGUOUS if reply.cell and FOR_COPIES in (reply.cell.reason or ""):
            yield "run again with fewer --requests or a smaller kv_cache_gib: the gate needs room"
        case Verdict.AMBIGUOUS if reply.cell and GATE_DID_NOT in (reply.cell.reason or ""):
            yield "find under Evidence what the gate did not compare, and run again"
            yield "fewer --requests or a larger kv_cache_gib leave more of the cache in place"
        case Verdict.AMBIGUOUS:
            arm = next((cell for cell in cells if cell.arm == AA), None)
            if reply.cell is not None and work_differs(reply.cell, arm):
                yield "a faster host, or more --requests, would let the step show it"
            yield _measure_longer(reply.cell)
        case _ if on_cpu(header) and header.spec.against:
            yield "run the same command on the GPU that you serve with"
        case _ if header.checks_only and not on_cpu(header):
            yield "time it: the same command without --batches 0"
        case _ if on_cpu(header) and cells:
            yield f"on the GPU that you serve with: {_gpu_command(header)}"
            yield f"without a GPU: {PLAN} predicts what it can save"


def _measure_longer(cell: CellResult | None) -> str:
    """How many blocks would show an effect of the margin, if the noise stays as it is."""
    effect = None if cell is None else cell.smallest_effect
    if cell is None or effect is None:
        return "measure longer: --batches with more blocks, or --ci-width 0.5%"
    factor = (effect / DEFAULT_MARGIN) ** 2
    seen = f"only {percent(effect, 2)} or more would have shown here"
    if factor > _WORTH_WAITING:
        return f"find out what disturbs the machine: {seen}"
    if cell.interleaved == WINDOWS:
        return f"measure {max(factor, 2):.0f} times as long (--time-budget): {seen}"
    blocks = max(ceil(factor * cell.batches), 2 * cell.batches)
    visible = percent(DEFAULT_MARGIN * (cell.batches / blocks * factor) ** 0.5, 2)
    return f"measure longer, --batches {blocks} would show {visible}: {seen}"


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
    return f"nwor-bench sweep --model {target} {drafter} --ci-width 0.5%"
