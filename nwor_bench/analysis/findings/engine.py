"""The engine did less than was asked: windows that stock wrote, no graph, requests that waited."""

from collections import defaultdict
from math import ceil, inf
from statistics import fmean

from nwor_bench.analysis.findings.finding import Case, Cases, Evidence, FindingKind, Row, Severity
from nwor_bench.instruments.draft_counts import capture_size
from nwor_bench.models.methods import WITHOUT_DRAFTER
from nwor_bench.records.cell import Cell
from nwor_bench.records.fallback_reasons import (
    NO_CUDA,
    mamba_cache_mode,
    unsupported_states,
    written_elsewhere,
)
from nwor_bench.records.types import AA, CellResult, NworMode, Verdict, WindowRecord

_STATES_REMEDY = {
    mamba_cache_mode(""): "Write --engine-args '{{\"enable_prefix_caching\": false}}'. "
    "With prefix caching vLLM copies states at the end of each block.",
    unsupported_states(""): "Nothing to do. Only gated delta nets of known shapes stage states.",
}
"""Remedies by the refusal without its detail."""


def _ineffective(evidence: Evidence) -> Cases:
    """Modes that never fired, one finding a reason; those beside a checked one weaken nothing."""
    checked = any(c.verdict == Verdict.CHECKED and c.arm != AA for c in evidence.cells)
    severity = Severity.NOTE if checked else Severity.WARNING
    idle: dict[str | None, list[CellResult]] = defaultdict(list)
    for cell in sorted(evidence.cells, key=lambda cell: cell.nwor_mode == NworMode.OFF):
        if cell.verdict == Verdict.INEFFECTIVE:
            idle[cell.reason].append(cell)
    for reason, same in idle.items():
        no_cuda = all(NO_CUDA in c.scv_fallbacks and not c.fallbacks for c in same)
        remedy = "Measure it on a GPU. It needs CUDA." if no_cuda else None
        names = ", ".join(cell.label for cell in same)
        yield Case({"cells": names, "reason": reason}, severity=severity, remedy=remedy)


def _fallbacks(evidence: Evidence) -> Cases:
    for cell in evidence.cells:
        if cell.fallbacks and cell.verdict != Verdict.INEFFECTIVE:
            share = sum(cell.fallbacks.values()) / max(1, cell.windows)
            reasons = ", ".join(f"{reason} {n}" for reason, n in cell.fallbacks.items())
            severity = Severity.WARNING if share > 0.1 else Severity.NOTE
            yield Case({"share": 100 * share, "reasons": reasons}, cell.label, severity)


def _elsewhere(evidence: Evidence) -> Cases:
    for cell in evidence.cells:
        reasons = ", ".join(filter(written_elsewhere, cell.fallbacks))
        if reasons:
            yield Case({"reasons": reasons}, cell.label)


def _states(evidence: Evidence) -> Cases:
    """Recurrent states that stock wrote in mode stage: refused as the engine started, or in every
    window of a cell. Cells that staged nothing have another finding."""
    staged: dict[Cell, list[WindowRecord]] = defaultdict(list)
    for window in evidence.run.windows:
        if window.staged_tokens:
            staged[window.cell].append(window)
    cells = [cell.cell for cell in evidence.cells if cell.cell in staged]
    refused = evidence.engine.states_unavailable
    if refused is not None and cells:
        unknown = "Read engine.log. It has the traceback."
        yield Case(
            {"reason": refused},
            severity=Severity.NOTE,
            sentence="Stage holds K/V only: stock writes the recurrent states ({reason}).",
            remedy=_STATES_REMEDY.get(refused[: refused.find(":") + 1], unknown),
        )
    idle = [cell for cell in cells if not any(w.states_committed for w in staged[cell])]
    if evidence.engine.state_layers and idle:
        reasons = {w.states_reason or "no reason given" for cell in idle for w in staged[cell]}
        names = ", ".join(cell.label for cell in idle)
        yield Case({"cells": names, "reasons": ", ".join(sorted(reasons))})


def _no_graph(evidence: Evidence) -> Cases:
    """Windows of all requests are larger than the largest of vLLM's full graphs. If each draft
    count has an engine, the header has the facts of the one without drafts."""
    graphs = evidence.engine.cuda_graphs
    most = None if graphs is None or evidence.run.header.spec.engines else graphs.largest_window
    requests, drafts = (evidence.scenario.get(name, 0) for name in ("requests", "draft_tokens"))
    tokens = requests * (drafts + 1)
    if most is not None and tokens > most:
        values = {"tokens": tokens, "requests": requests, "drafts": drafts, "most": most}
        yield Case({**values, "enough": capture_size(tokens)})


def _attention(evidence: Evidence) -> Cases:
    graphs = evidence.engine.cuda_graphs
    if graphs and graphs.attention_untimed:
        yield Case({"why": graphs.attention_untimed})


def _concurrency(evidence: Evidence) -> Cases:
    """Prompt lookup does not draft for every request: there only windows at k = 0 show all."""
    engine, requests = evidence.engine, evidence.scenario.get("requests", 0)
    every = evidence.run.header.pair.method not in WITHOUT_DRAFTER
    most = max((w.num_reqs for w in evidence.run.windows if every or w.cell.drafts == 0), default=0)
    need = ceil(evidence.longest / (engine.block_size or 1))
    has_room = engine.state_slots is None and need * requests < (engine.num_gpu_blocks or inf)
    if 0 < most < requests and not has_room:
        slots = f" and {engine.state_slots} slots of states" if engine.state_slots else ""
        more = "one state slot a request (docs/states.md)" if slots else "an fp8 cache"
        values = {"most": most, "requests": requests, "need": need, "slots": slots, "more": more}
        yield Case({**values, "blocks": engine.num_gpu_blocks, "size": engine.block_size})


def _short_outputs(evidence: Evidence) -> Cases:
    """Most outputs end before the longest one, which a batch may have cut."""
    tokens = [tokens for batch in evidence.timed for tokens, _ in batch.request_tokens]
    most = evidence.scenario.get("max_new_tokens", 0)
    if tokens and fmean(tokens) < most / 2 and tokens.count(max(tokens)) < len(tokens) / 2:
        yield Case({"mean": ceil(fmean(tokens)), "most": most})


ROWS = (
    Row(FindingKind.INEFFECTIVE, _ineffective, "{cells} never fired: {reason}.",
        "Find the reason under Evidence (fallbacks). Ignore its cells' times.",
        "A mode never fired"),
    Row(FindingKind.FALLBACKS, _fallbacks,
        "{name}: {share:.1f} % of its windows were written directly ({reasons}).",
        "The ratio is a mixture. Evidence explains the reasons.", "Windows that staged nothing"),
    Row(FindingKind.ELSEWHERE, _elsewhere,
        "{name}: K/V did not come by the write that nwor-bench wraps ({reasons}). Another kernel "
        "wrote them, every draft token's too.",
        "Switch that fusion off. See --compilation-config, pass_config.",
        "K/V that another kernel wrote"),
    Row(FindingKind.STATES, _states,
        "Stock wrote the recurrent states of every staged window of {cells} ({reasons}). What was "
        "measured there is K/V only.", "Read states_reason in windows.csv. engine.log may have a "
        "traceback.", "Stock wrote states"),
    Row(FindingKind.NO_GRAPH, _no_graph,
        "Windows of {tokens:,} tokens ({requests} requests, {drafts} drafts) have no CUDA graph: "
        "vLLM captured none above {most:,} tokens. Launched one by one they take longer.",
        "Capture larger ones. Write --engine-args '{{\"compilation_config\": "
        "{{\"max_cudagraph_capture_size\": {enough}}}}}'. Serve with the same graphs.",
        "The largest windows have no CUDA graph"),
    Row(FindingKind.ATTENTION, _attention,
        "What attends windows could not be timed ({why}). A table chose it, so it may be slower "
        "than stock.", "Read why in engine.log. Or choose it with --attention.",
        "What attends windows could not be timed"),
    Row(FindingKind.CONCURRENCY, _concurrency,
        "At most {most} of {requests} requests ran at once: the cache has {blocks:,} blocks of "
        "{size:,} tokens, and a request takes up to {need:,}{slots}.",
        "Write --requests {most}. Or free more: a larger kv_cache_gib, {more}, or more ranks "
        "(--tensor-parallel-size).", "Some requests waited"),
    Row(FindingKind.SHORT_OUTPUTS, _short_outputs,
        "Outputs end after {mean} of {most} tokens on average: the last windows of a batch have "
        "few requests.",
        "Write --max-new-tokens {mean}. Then more requests end together.", "Outputs are short"),
)  # fmt: skip
