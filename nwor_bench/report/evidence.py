"""The evidence for a sceptic: tokens, layers, K/V and counters of every cell, and fallbacks."""

from collections.abc import Mapping, Sequence
from typing import Any

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.invariants import counter_checks
from nwor_bench.analysis.parity.kv import KV_EVENT, KvVerdict
from nwor_bench.analysis.parity.local import LOCAL_EVENT
from nwor_bench.records.cell import Cell
from nwor_bench.records.facts import to_json
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import (
    BatchRecord,
    CellResult,
    NworMode,
    Phase,
    Verdict,
    WindowRecord,
)
from nwor_bench.report.document import Block, Bullets, Paragraph, Section, Table, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, joined, plural, settings

TITLE = "Evidence"

TOKENS = (
    "Tokens: each cell first generates greedily, and its tokens are compared with those of off x "
    "off, request by request. A cell that differs is INVALID and has no times, unless every "
    "differing token is a tie."
)
LOCAL = (
    "Layers: in some windows of each staging cell's gate batch every target layer is checked on "
    "its own inputs. Stock's write of the same K and V must leave the same bits, and no other row "
    "of the cache may change. Attention may differ from stock's by the rounding of one attention, "
    "taken from stock's own error against a float64 reference for each head. Full CUDA graphs are "
    "checked by a second capture that copies each layer's inputs; its output must equal that of "
    "the timed graph, bit for bit, if that graph repeats itself."
)
KV = (
    "K/V: after each staging cell's gate batch the KV cache is read back (every target layer, "
    "head, rank and position) and compared with what mode off leaves for the same tokens. An error "
    "is the distance of one head's row to the reference as a fraction of the layer's row norm. "
    "Allowed is a few times mode off's own error (decoded against prefilled, and prefilled in two "
    "batch shapes)."
)
STATES = (
    "States: those of at most 8 requests, spread over the batch, are copied as one of their last "
    "windows begins, and compared with off x off's after the same tokens, or, where tokens or "
    "windows differ, with mode off's prefill of the cell's own. An error is the distance of one "
    "head's state as a fraction of the layer's norm; allowed is the same as for K/V."
)
COUNTERS = (
    "Counters: summed over all batches of a cell, gate and warm-up included. vLLM's are read from "
    "the running engine before and after each batch. Windows of requests that had already finished "
    "are left out, as vLLM does."
)
GATED = (
    "In the gate the context does not choose: sizes that are written directly at some contexts are "
    "staged, but for a random quarter of their windows."
)
FALLBACKS = (
    "Fallbacks: NWOR fell back if it wrote a window's draft tokens directly, SCV if it validated "
    "a window in another way than its mode asks for. Neither changes the output."
)

MEANINGS = {
    "no_cuda": "no CUDA device: the host validated",
    "capture_not_supported": "vLLM's V1 runner: the host validated",
    "uneven_windows": "requests had different numbers of drafts; no graph covers that",
    "breakable_cuda_graphs": "a breakable piecewise CUDA graph contains the cache's write",
    "slower_than_stock": "stock's write and attention are faster for this size and context",
    "stock_attention": "VLLM_NWOR_ATTENTION=stock",
    "beside_prefill": "the step ran a prefill too, whose rows it writes anyway",
    "window_beside_prefill_of_its_request": "a request was still in its prefill in this step",
    "full_graph_of_another_shape": "vLLM replayed a CUDA graph that was captured without staging",
    "full_graph_with_uneven_windows": "a full CUDA graph needs equally many drafts per request",
    "micro_batches": "vLLM split the step into micro-batches",
    "step_not_finished": "vLLM did not sample after this step's forward pass",
    "layer_staged_twice": "a layer ran twice in one step",
    "sampled_ids_shape": "the sampled ids had an unknown shape",
    "sampled_ids_dtype": "the sampled ids had an unknown type",
    "more_drafts_than_capacity": "more drafts than the staging buffers hold",
    "no_target_layers": "no attention layer of the target was found",
    "kv_shape": "K or V came in an unknown shape",
}
"""In words; other reasons are printed unchanged."""


def evidence_section(analysis: Analysis) -> Section:
    """Every gate's result with its method, our counters beside vLLM's, and fallbacks."""
    run, cells = analysis.run, analysis.cells
    violations = tuple(violation.text for violation in analysis.violations)
    told = (local_sentence(run), kv_sentence(run), state_sentence(run))
    blocks: list[Block] = [*(Paragraph(text) for text in told if text), _tokens(run, cells),
                           Paragraph(TOKENS), *_gate_size(run), *_gated(run, cells),
                           *local_blocks(run), *kv_blocks(run), *state_blocks(run)]  # fmt: skip
    facts = list(settings(to_json(run.header.parity)))
    if facts:
        blocks.append(table(["Gate", "Value"], facts, numbers_from=2, caption="The gate"))
    if violations:
        blocks += [Paragraph("Counts that do not add up:", strong=True), Bullets(violations)]
    else:
        blocks.append(
            Paragraph(
                "The counts add up: in every window staged = committed + rejected and stage "
                "operations = staged x target layers, and all cells of a block had the same "
                "prompts."
            )
        )
    blocks += [_counters(run), Paragraph(COUNTERS), *_fallbacks(cells), Paragraph(FALLBACKS)]
    broken = violations or any(cell.parity == Verdict.INVALID for cell in cells)
    return Section(TITLE, tuple(blocks), brief=True, folded=not broken)


def _gate_size(run: RunData) -> list[Block]:
    """How large the gate's batches were, if prompts were cut."""
    gate = run.header.gate
    if gate.whole is None or gate.whole == gate.requests:
        return []
    room = "" if gate.room_s is None else f" (the budget left it {gate.room_s:.1f} s)"
    sentence = (
        f"Each batch of the gate ran {plural(gate.requests or 0, 'request')}, {gate.whole} of them "
        f"with a whole prompt (the longest has {count(gate.longest_prompt)} tokens), the others "
        f"with the end of one: {count(gate.prompt_tokens)} prompt tokens, {gate.new_tokens} new "
        f"ones a request{room}. Tokens of all were compared. With --batches 0 nothing is cut."
    )
    return [Paragraph(sentence)]


def _gated(run: RunData, cells: Sequence[CellResult]) -> list[Block]:
    """Which windows the gate staged, and how, beside those that were timed."""
    phases = {batch_key(batch): batch.phase for batch in run.batches}
    both = (Phase.GATE, Phase.INTERLEAVED_GATE), (Phase.TIMED, Phase.INTERLEAVED)
    rows = []
    for cell in (c for c in cells if c.nwor_mode == NworMode.STAGE):
        of_cell = [window for window in run.windows if window.cell == cell.cell]
        gate, timed = ([w for w in of_cell if phases.get(batch_key(w)) in some] for some in both)
        if gate and timed:
            shares = [_staged(windows) for windows in (gate, timed)]
            rows.append([cell.label, *shares, _attended(gate), _attended(timed)])
    if not rows:
        return []
    context = [_context([b for b in run.batches if b.phase in some]) for some in both]
    caption = f"Mean context: {context[0]} tokens in the gate, {context[1]} timed"
    heads = ["Cell", "Staged, gate", "Staged, timed", "Attention, gate", "Attention, timed"]
    forced = any(window.path is not None for window in run.windows)  # as none was in older runs
    note = [Paragraph(GATED)] if forced else []
    return [table(heads, rows, numbers_from=1, caption=caption), *note]


def _staged(windows: Sequence[WindowRecord]) -> str:
    """Part of the drafts that was staged."""
    drafts = sum(window.draft_tokens for window in windows)
    return f"{sum(window.staged_tokens for window in windows) / drafts:.0%}" if drafts else ""


def _attended(windows: Sequence[WindowRecord]) -> str:
    """What attended staged windows."""
    paths = dict.fromkeys(window.path for window in windows if window.path)
    return ", ".join(sorted({path.split(", ")[1] for path in paths})) or NOT_MEASURED


def _context(batches: Sequence[BatchRecord]) -> str:
    """A request's mean context over its windows."""
    tokens = sum(batch.prompt_tokens + batch.output_tokens / 2 for batch in batches)
    return count(round(tokens / sum(batch.requests for batch in batches)))


def _tokens(run: RunData, cells: Sequence[CellResult]) -> Table:
    rows = []
    for cell in cells:
        compared = [b for b in run.batches if b.cell == cell.cell and b.parity is not None]
        mismatch = next((b.first_mismatch for b in compared if b.first_mismatch), NOT_MEASURED)
        requests = sum(batch.requests for batch in compared)
        parity = cell.parity or "not checked"
        rows.append([cell.label, parity, mismatch, count(len(compared)), count(requests)])
    heads = ["Cell", "Parity", "First mismatch", "Compared batches", "Requests"]
    return table(heads, rows, numbers_from=3, caption="Tokens compared with those of off x off")


def _counters(run: RunData) -> Table:
    agree = {True: "yes", False: "NO", None: NOT_MEASURED}
    rows = [
        [check.cell.label, check.counter, count(check.ours), count(check.vllm),
         agree[check.agrees]]
        for check in counter_checks(run)
    ]  # fmt: skip
    heads = ["Cell", "Counter", "Window records", "vLLM", "Agree"]
    return table(heads, rows, numbers_from=2, caption="Our counters beside vLLM's own")


def _fallbacks(cells: Sequence[CellResult]) -> list[Block]:
    rows = []
    for cell in cells:
        scv = dict(cell.scv_fallbacks)
        unexplained = (cell.scv_fallback_count or 0) - sum(scv.values())
        if unexplained > 0:
            scv["(reason not recorded)"] = unexplained
        rows += [
            [cell.label, kind, reason, MEANINGS.get(reason, NOT_MEASURED), count(times),
             count(cell.windows)]
            for kind, reasons in (("NWOR", cell.fallbacks), ("SCV", scv))
            for reason, times in reasons.items()
        ]  # fmt: skip
    if not rows:
        return [Paragraph("No timed window fell back.")]
    heads = ["Cell", "Kind", "Reason", "Meaning", "Fallbacks", "Windows"]
    return [table(heads, rows, numbers_from=4, caption="Fallbacks by reason")]


def gate_results(run: RunData, event: str) -> dict[str, Mapping[str, Any]]:
    """A gate's last result for each cell, by its label; empty for runs without that gate."""
    return {Cell.from_names(e).label: e for e in run.events if e.get("event") == event}


def local_sentence(run: RunData) -> str:
    """Result of the layers' check in a sentence; "" for runs without it."""
    results = gate_results(run, LOCAL_EVENT)
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
        if first.get("states"):
            both = first.get("convolutions") == first["states"]
            what = "Recurrent and convolution states" if both else "Recurrent states"
            sentences.append(f"{what} of {plural(first['states'], 'layer')} are stock's, too.")
    if broken:
        sentences.append(f"A layer of {joined(broken)} differs from stock on the same inputs.")
    if unchecked:
        sentences.append(f"Layers of {joined(unchecked)} were not checked one by one.")
    return " ".join(sentences)


def local_blocks(run: RunData) -> list[Block]:
    """The table of the layers' check and its method; nothing for runs without it."""
    heads = ["Cell", "Layers", "What differs", "Windows", "Rows written", "Rejected drafts",
             "Attention's error over allowed"]  # fmt: skip
    rows = [
        [name, r["verdict"], r["reason"] or NOT_MEASURED, count(r["windows"]),
         count(r["written"]), count(r["rejected"]), decimal(r["nearest"], 2)]
        for name, r in gate_results(run, LOCAL_EVENT).items()
    ]  # fmt: skip
    body = table(heads, rows, numbers_from=3, caption="Each layer on its own inputs")
    return [body, Paragraph(LOCAL)] if rows else []


def kv_sentence(run: RunData) -> str:
    """How far the cache was compared and the result; "" for runs without a K/V gate."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, result in gate_results(run, KV_EVENT).items():
        groups.setdefault(_cache_words(result), []).append(name)
    return " ".join(
        f"The KV cache of {joined(names)} {verb}{rest}." for (verb, rest), names in groups.items()
    )


def _cache_words(result: Mapping[str, Any]) -> tuple[str, str]:
    """Verb and rest of a cell's sentence; cells with equal words share the sentence."""
    verdict = result["verdict"]
    if verdict == "not run":
        return "was not checked", f": {result['reason']}"
    if verdict == Verdict.INVALID:
        return "is wrong", ""
    ranks = f" on {result['ranks']} ranks" if result["ranks"] > 1 else ""
    return "is what mode off leaves", (
        f", {verdict}: {count(result['checked'])} of {count(result['committed'])} positions in "
        f"{_layers(result)}{ranks} were compared"
    )


def _layers(result: Mapping[str, Any]) -> str:
    """`28 layers`, or `20 of 28 layers` if mode off is too unstable for a comparison in others."""
    of_layers = result.get("of_layers") or result["layers"]
    some = "" if of_layers == result["layers"] else f"{count(result['layers'])} of "
    return f"{some}{plural(of_layers, 'layer')}"


def state_sentence(run: RunData) -> str:
    """How many states were compared end to end, and the result; "" for runs without any."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, result in gate_results(run, KV_EVENT).items():
        if result.get("states"):
            groups.setdefault(_state_words(result["states"]), []).append(name)
    return " ".join(f"{what} of {joined(names)} {rest}." for (what, rest), names in groups.items())


def _state_words(result: Mapping[str, Any]) -> tuple[str, str]:
    if result["verdict"] == KvVerdict.NOT_RUN:
        return "States", f"were not compared end to end: {result['reason']}"
    if result["verdict"] == KvVerdict.BROKEN:
        return "A recurrent or convolution state", "is wrong"
    what = (
        f"{count(result['states'])} states of {plural(result['requests'], 'request')} in "
        f"{_layers(result)}"
    )
    return what, f"equal mode off's end to end, {result['verdict']}"


def state_blocks(run: RunData) -> list[Block]:
    """The table of states end to end and its method; nothing for runs without any."""
    rows = []
    for name, result in gate_results(run, KV_EVENT).items():
        states = result.get("states")
        if states:
            near = decimal((states["finding"] or {}).get("ratio"), 2)
            counts = [count(states[key]) for key in ("states", "layers", "requests", "alike")]
            reason = states["reason"] or NOT_MEASURED
            rows.append([name, states["verdict"], reason, *counts, near])
    heads = ["Cell", "States", "What differs", "Compared", "Layers", "Requests",
             "With off x off's tokens", "Largest error over allowed"]  # fmt: skip
    body = table(heads, rows, numbers_from=3, caption="Recurrent states compared with mode off's")
    return [body, Paragraph(STATES)] if rows else []


def kv_blocks(run: RunData) -> list[Block]:
    """The table of the K/V gate and its method; nothing for runs without one."""
    rows = []
    for name, result in gate_results(run, KV_EVENT).items():
        finding = result.get("finding") or {}
        near = decimal(finding.get("ratio"), 2) if finding.get("allowed") else NOT_MEASURED
        positions = NOT_MEASURED
        if result["committed"] is not None:
            positions = f"{count(result['checked'])} of {count(result['committed'])}"
        rows.append([name, result["verdict"], result["reason"] or NOT_MEASURED, positions, near])
    if not rows:
        return []
    heads = ["Cell", "K/V", "What differs", "Positions", "Largest error over allowed"]
    body = table(heads, rows, numbers_from=3, caption="The KV cache compared with mode off's")
    return [body, Paragraph(KV)]
