"""What reports say of made-up runs: the answer, the questions after it, and the line for vLLM.

Each case changes one thing. tests/golden/said has the texts; golden_files.py writes them.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from check_runs import FAR, TIE, UNKNOWN, K, check_run, checked, failed, unsteady, with_places
from interleaved_run import Planted, interleaved_run
from report_runs import RUNS, faster, gpu_run, ineffective, spent_by_gate
from rich.console import Console
from synthetic_run import (
    analysed,
    change_batches,
    change_windows,
    kept,
    make_run,
    summarised,
    with_header,
    with_parts,
)

from nwor_bench.analysis.check import check_of
from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.parity.kv import KvMismatch, KvResult, KvVerdict, StateResult, kv_event
from nwor_bench.analysis.parity.local import local_event, local_result
from nwor_bench.analysis.worth import WindowTime
from nwor_bench.records.cell import SHAM, SWITCHED
from nwor_bench.records.facts import CudaGraphs
from nwor_bench.records.header import PairFacts, ParityFacts
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Cell, CellResult, NworMode, RunStatus, ScvMode, Verdict
from nwor_bench.report.check import check_answer, check_screen
from nwor_bench.report.document import Definitions, Document
from nwor_bench.report.facts import facts, next_steps
from nwor_bench.report.markdown import render_blocks
from nwor_bench.report.precision import interleaved_blocks
from nwor_bench.report.run_report import answer_of, exit_code_of
from nwor_bench.report.terminal import print_document
from nwor_bench.report.worth import noise_note, rates_table
from nwor_bench.report.worth_answer import line_blocks, worth_answer
from nwor_bench.stats.robust import from_ends

STAGE = Cell("tiny", NworMode.STAGE, ScvMode.OFF)
GRAPH = Cell("tiny", NworMode.STAGE, ScvMode.GRAPH)

FINDING = KvMismatch("largest", 0.02, 0.03, 0.01, 0, 1, "layers.1", "V", "output", 2, 7, 1)
OF_STATES = KvMismatch(
    "largest", 0.5, 0.02, 0.01, 0, 1, "layers.1", "recurrent state", "output", 2, 57, 3
)
WITHIN = KvResult(KvVerdict.WITHIN, committed=2293, checked=2200, unknown=93, beyond_budget=0,
                  layers=28, ranks=2, finding=FINDING)  # fmt: skip
NOT_RUN = KvResult(KvVerdict.NOT_RUN, "nothing was staged")
STATES = StateResult(
    KvVerdict.WITHIN, None, 8, 7, 5, 12, 84, replace(OF_STATES, error=0.005, allowed=0.02)
)


def with_kv(*results: tuple[Cell, KvResult]) -> RunData:
    """A run with these results of the K/V gate."""
    run = faster()
    events = tuple(kv_event(cell, result, 0) for cell, result in results)
    facts = {"seconds": 0.5, "gate_seconds": 10.0, "multiples": {"largest": 3.0},
             "own_errors": {"largest": {"smallest": 0.001, "largest": 0.01}}}  # fmt: skip
    return with_parts(replace(run, events=(*run.events, *events)), kv_gate=facts)


def gated(*verdicts: KvVerdict, parity: str = "acceptance only") -> RunData:
    """A run whose cells are all faster; the K/V gate's verdicts on its staging cells, in turn."""
    run = faster()
    batches = tuple(replace(b, parity=parity) if b.parity == "exact" else b for b in run.batches)
    cells = [Cell("toy", NworMode.STAGE, scv) for scv in ScvMode]
    events = tuple(
        kv_event(cell, KvResult(v, "its blocks were reused"), 0) for v in verdicts for cell in cells
    )
    return replace(run, batches=batches, events=(*run.events, *events))


def without_room() -> RunData:
    """A run whose local gate had no memory for copies of states."""
    run = gated(KvVerdict.WITHIN)
    window = {"path": "full graph", "graphs": None, "copies_need": 5_500_000_000, "layers": [],
              "rejected": 0, "seconds": 0.0, "whole_caches": 0}  # fmt: skip
    result = local_result([[window]])
    cells = (Cell("toy", NworMode.STAGE, scv) for scv in ScvMode)
    return replace(run, events=(*run.events, *(local_event(cell, result) for cell in cells)))


def chosen_among_two(first: float, second: float) -> list[CellResult]:
    """Two FASTER cells by ratio; the first's interval for all cells holds 1, the second's not."""
    both = {"stage x off": (first, 1.001), "stage x graph": (second, 0.999)}
    return [
        replace(cell, verdict="FASTER", ratio=from_ends(both[cell.label][0], 0.9, 0.9985, 8),
                sure=from_ends(both[cell.label][0], 0.89, both[cell.label][1], 8))
        if cell.label in both
        else replace(cell, ratio=replace(cell.ratio, value=0.9995), verdict="SAME")
        if cell.ratio is not None
        else cell
        for cell in summarised(faster())
    ]  # fmt: skip


def split_run() -> RunData:
    """Interleaved windows with the control, so that the effect is split."""
    planted = Planted(
        {"stage x graph": 0.972, "control x off": 0.985}, clocks=(1980.0, 1410.0, 1700.0)
    )
    return interleaved_run(planted, 15, whole={"graph": 0.972, "control": 0.985})


def with_sham(counts: dict[str, int]) -> RunData:
    """An interleaved run whose A/A cell switched in so many windows, by reason."""
    cells = {"off x off (A/A)": {"scv_counters": {}, "scv_fallbacks": {}, SHAM: counts}}
    event = {"event": "interleaved", "batch": 5000, "block": 1, "cells": cells}
    run = split_run()
    return replace(run, events=(*run.events, event))


def stock_by_choice() -> RunData:
    """Windows written as stock, since that was timed to be faster."""
    run = ineffective("slower_than_stock")
    times = {"context": [100, 200], "stock": [20.0, 30.0], "ours": [1.0, 41.4], "merge": [1.0, 42]}
    graphs = CudaGraphs(attention_us={"2x5": {"8/2x64": times}})
    assert run.header.engine is not None
    engine = run.header.engine.model_copy(update={"cuda_graphs": graphs})
    return replace(run, header=run.header.model_copy(update={"engine": engine}))


def with_ties() -> RunData:
    """Tokens of staging cells differ at ties."""
    run = _parity("explained", faster())
    facts = {"largest_gap_nats": 0.0625, "allowance_nats": 0.1254}
    header = run.header.model_copy(update={"parity": ParityFacts(ties=facts)})
    return replace(run, header=header)


def _parity(parity: str | None, run: RunData) -> RunData:
    def staged(batch: Any) -> bool:
        return bool(batch.nwor_mode == "stage" and batch.parity is not None)

    return change_batches(run, staged, parity=parity)


def _wrong(run: RunData) -> RunData:
    def graph(batch: Any) -> bool:
        return bool((batch.nwor_mode, batch.scv_mode) == ("stage", "graph"))

    return change_batches(run, graph, parity="INVALID", first_mismatch="request 1: 2 not 3")


def _own_models(run: RunData, draft: str | None) -> RunData:
    run = with_header(run, "pair", target="org/name", method="draft_model")
    return with_parts(run, choice={"target_model": "org/name", "draft_model": draft})


def _only(run: RunData, test: Callable[[Any], bool]) -> RunData:
    return kept(run, test)


CASES: Mapping[str, Callable[[], RunData]] = {
    **RUNS,
    "stock by choice": stock_by_choice,
    "one compared cell": lambda: _only(
        faster(), lambda r: (r.nwor_mode, r.scv_mode) in {("off", "off"), ("stage", "graph")}
    ),
    "off x off broke": lambda: change_batches(
        faster(), lambda b: b.arm is not None and b.phase == "gate", parity="INVALID"
    ),
    "no A/A": lambda: _only(faster(), lambda r: r.arm is None),
    "only SCV": lambda: _only(gpu_run(), lambda r: r.nwor_mode == "off"),
    "only off x off": lambda: _only(gpu_run(), lambda r: (r.nwor_mode, r.scv_mode) == ("off",) * 2),
    "ties": with_ties,
    "not checked": lambda: _parity(None, faster()),
    "partial": lambda: with_parts(faster(), status="partial"),
    "hopeless noise": lambda: gpu_run(noise=0.3, blocks=8),
    "some noise": lambda: gpu_run(noise=0.012, blocks=8),
    "batches, no windows": lambda: change_windows(faster(), lambda w: True, wall_ms=None),
    "staged by copy": lambda: with_header(faster(), "spec", stage_by="copy"),
    "attention by merging": lambda: with_header(faster(), "spec", attention="merge"),
    "own models": lambda: _own_models(faster(), "org/draft"),
    "own models on a CPU": lambda: _own_models(make_run(aa=True), "org/draft"),
    "split": split_run,
    "gate spent the budget": lambda: spent_by_gate(counters="dram"),
    "spent and partial": lambda: with_parts(spent_by_gate(), status=RunStatus.PARTIAL),
    "spent and failed": lambda: with_parts(spent_by_gate(), status=RunStatus.FAILED),
    "spent and INVALID": lambda: _wrong(spent_by_gate()),
    "spent on a CPU": lambda: with_header(spent_by_gate(), "engine", device="cpu"),
    "K/V within": lambda: with_kv((STAGE, WITHIN), (GRAPH, WITHIN)),
    "K/V of some layers": lambda: with_kv((STAGE, replace(
        WITHIN, layers=20, of_layers=28, states=replace(STATES, of_layers=36)))),
    "K/V not run": lambda: with_kv((STAGE, WITHIN), (GRAPH, NOT_RUN)),
    "K/V run again": lambda: with_kv((STAGE, NOT_RUN), (STAGE, WITHIN)),
    "K/V wrong": lambda: with_kv((STAGE, replace(WITHIN, verdict=KvVerdict.BROKEN))),
    "states within": lambda: with_kv(
        *((cell, replace(WITHIN, states=STATES)) for cell in (STAGE, GRAPH))),
    "states wrong, and not run": lambda: with_kv(
        (STAGE, replace(WITHIN, states=replace(STATES, verdict=KvVerdict.BROKEN))),
        (GRAPH, replace(WITHIN, states=StateResult(KvVerdict.NOT_RUN, "nobody was copied", 2)))),
    "synthetic, K/V not compared": lambda: gated(KvVerdict.NOT_RUN),
    "no room for copies of states": without_room,
}  # fmt: skip
"""Runs of which the answer and the questions are kept."""

CHANGED_CELLS: Mapping[str, Callable[[], list[CellResult]]] = {
    **{f"tokens undecided by {why}": lambda why=why: [
        replace(cell, tokens_per_s_noise=why,
                sure_rate=cell.sure_rate and replace(cell.sure_rate, low=0.998))
        for cell in summarised(faster())] for why in ("acceptance", "time")},
    "no tokens/s": lambda: [replace(c, rate=None) for c in summarised(faster())],
    "best of those sure for all": lambda: chosen_among_two(0.94, 0.95),
    "sure only by Holm": lambda: [
        cell for cell in chosen_among_two(0.94, 0.95) if cell.label != "stage x graph"],
    "synthetic": lambda: [replace(c, parity="acceptance only") for c in summarised(faster())],
    "fly": lambda: [replace(c, parity="lossy") for c in summarised(faster())],
    "no cells": lambda: [],
}  # fmt: skip
"""The cells of `faster`, changed."""


def answers() -> str:
    """Answer, exit code and questions of every case."""
    runs = [(name, make(), None) for name, make in CASES.items()]
    runs += [(name, faster(), make()) for name, make in CHANGED_CELLS.items()]  # type: ignore[misc]
    return "\n\n".join(_said(*case) for case in runs) + "\n"


def _said(name: str, run: RunData, cells: Sequence[CellResult] | None) -> str:
    found = analysed(run, cells)
    code = f"exit code {int(exit_code_of(found))}"
    blocks = [answer_of(found).headline, facts(found), next_steps(found)]
    return f"## {name} ({code})\n\n{render_blocks(blocks)}"


FAST, SLOW, OPEN = Verdict.FASTER, Verdict.SLOWER, Verdict.AMBIGUOUS
PAIR = PairFacts(method="eagle", draft="/d", speculative={"a": 1})
SHAPE = PairFacts(method="eagle", draft="/d", speculative={
    "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.6, "b": 2,
})  # fmt: skip


def rate(requests: int, k: int, ratio: float | None, verdict: Verdict, **more: Any) -> Rate:
    """A draft count's rate with an interval of +- 0.1."""
    found = None if ratio is None else from_ends(ratio, ratio - 0.1, ratio + 0.1, 5)
    return replace(Rate(requests, k, found, str(verdict), 1.0, 2.0, 5), **more)


def worth(rates: Sequence[Rate], best: Mapping[int, int], **more: Any) -> Worth:
    """What these rates are worth."""
    return replace(Worth(tuple(rates), best, 5, {}), **more)


def by_engines(several: bool) -> Worth:
    """k = 2 at 1 request, k = 1 at 8, and k = 1 for all."""
    rates = [rate(1, 1, 1.3, FAST), rate(1, 2, 1.5, FAST), rate(1, 2, 9.0, FAST, adaptive=True),
             rate(8, 1, 1.2, FAST), rate(8, 2, 0.9, SLOW)]  # fmt: skip
    return worth(rates, {1: 2, 8: 1}, by_engines=not several, best_fixed=1)


BOTH = worth([rate(1, 2, 1.9, FAST), rate(8, 2, 1.2, FAST)], {1: 2, 8: 2})
ONE = worth([rate(1, 2, 1.9, FAST)], {1: 2, 8: 2})

WORTHS: Mapping[str, Worth] = {
    "pays at both": BOTH,
    "pays at 1": worth([rate(1, 2, 1.9, FAST), rate(8, 2, 0.9, OPEN)], {1: 2, 8: 0}),
    "pays at 8": worth([rate(1, 2, 0.9, OPEN), rate(8, 2, 1.9, FAST)], {1: 0, 8: 2}),
    "1 not measured": worth([rate(1, 2, None, OPEN), rate(8, 2, 1.9, FAST)], {8: 2}),
    "1 of too few groups": worth(
        [rate(1, 2, 2.1, OPEN, groups=3), rate(8, 2, 1.9, FAST)], {8: 2},
        noise=dict.fromkeys((1, 8), from_ends(1.0, 0.99, 1.01, 5))),
    "slower at both": worth([rate(1, 2, 0.8, SLOW), rate(8, 2, 0.7, SLOW)], {1: 0, 8: 0}),
    "open": worth([rate(1, 2, 1.05, OPEN), rate(8, 2, 0.7, SLOW)], {1: 0, 8: 0}),
    "nothing measured": worth([rate(1, 2, None, OPEN)], {}),
    "adaptive beside slower ones": worth(
        [rate(1, 1, 0.8, SLOW), rate(1, 2, 0.7, SLOW), rate(1, 2, 1.4, FAST, adaptive=True)],
        {1: 0}, by_engines=True),
    "one engine of several counts": by_engines(several=True),
    "engines of one count": by_engines(several=False),
    "noise": worth([rate(8, 1, 1.44, OPEN)], {8: 0},
                   noise={8: from_ends(0.78, 0.62, 0.99, 12)}),
    **{f"staged {best}": replace(ONE, best_staged=best)
       for best in ({1: 2, 8: 2}, {1: 0, 8: 0}, {1: 4, 8: 2})},
    **{f"graphs {best}": worth([rate(size, k, 1.9, FAST) for size, k in best.items()], best)
       for best in ({1: 3, 8: 3}, {1: 3, 8: 1}, {128: 4}, {1: 3, 130: 4})},
}  # fmt: skip
"""Draft counts of which the sentence, the noise, the table and the line are kept."""


def draft_counts() -> str:
    """What is said of every case of draft counts, and the lines of some pairs and graphs."""
    run = analysed(make_run())
    shares = tuple(WindowTime(size, k, False, 100.0, 88.0) for size in (1, 8) for k in (0, 2))
    cases = [(name, found, ()) for name, found in WORTHS.items()]
    cases.append(("the drafter's pass at k = 0", BOTH, shares))  # type: ignore[arg-type]
    texts = []
    for name, found, times in cases:
        lines = line_blocks(found, PAIR, staged=True, captured=1024)
        reply = worth_answer(MeasuredWorth((run,), found, times))
        blocks = [reply.headline, Definitions(reply.facts), rates_table(found), *noise_note(found),
                  *lines]  # fmt: skip
        texts.append(f"## {name}\n\n{render_blocks(blocks)}")
    for name, pair, captured in (("a shape", SHAPE, 0), ("fewer tokens captured", PAIR, 512)):
        wide = worth([rate(128, 4, 1.9, FAST)], {128: 4})
        texts.append(
            f"## {name}\n\n{render_blocks(list(line_blocks(wide, pair, captured=captured)))}"
        )
    return "\n\n".join(texts) + "\n"


def shams() -> str:
    """What is said of the interleaved windows of runs whose A/A cell switched, or did not."""
    counts: tuple[dict[str, int], ...]
    counts = ({SWITCHED: 40}, {SWITCHED: 40, "odd": 2}, {"nothing_to_switch": 7})
    runs = [split_run(), *map(with_sham, counts), interleaved_run(Planted({}), batches=3)]
    return (
        "\n\n---\n\n".join(render_blocks(interleaved_blocks(analysed(run))) for run in runs) + "\n"
    )


CHECKS: Mapping[str, Callable[[], Sequence[RunData]]] = {
    "right": lambda: [check_run(4), check_run(1)],
    "ties": lambda: [with_places(check_run(parity="explained"), TIE, compared=256), check_run(1)],
    "wrong": lambda: [with_places(check_run(parity="INVALID"), FAR, TIE), check_run(1)],
    "wrong, and not a likely token": lambda: [with_places(check_run(parity="INVALID"), UNKNOWN)],
    "too many ties": lambda: [with_places(check_run(parity="INVALID"), TIE)],
    "died on a hybrid, by prompt lookup": lambda: [
        failed(check_run(4, state_slots=5), "RuntimeError: the size of tensor a\nmust match."),
        with_places(check_run(1, "INVALID", state_slots=5), FAR),
    ],
    "plain decoding differs from itself": lambda: [unsteady(check_run())],
    "no draft was accepted": lambda: [
        change_windows(check_run(), lambda w: w.arm == str(K), accepted_per_position=(0,) * 4)
    ],
    "a short drafter": lambda: [check_run(arms={"k=4": {"drafter_max_model_len": 128}})],
}
"""Runs of `nwor-bench check` of which the whole terminal page is kept, at 80 columns."""

MAX_LINES, MAX_WORDS = 22, 20
"""Of a terminal beside the report's path and the prompt; of a headline."""


def checks() -> str:
    """What a check prints in each case."""
    texts = []
    for name, make in CHECKS.items():
        check = check_of([checked(run) for run in make()])
        answer, out = check_answer(check), io.StringIO()
        print_document(Console(file=out, width=80), Document("", tuple(check_screen(check))))
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        assert len(lines) <= MAX_LINES
        assert len(answer.headline.line.split()) <= MAX_WORDS
        code = f"exit code {int(answer.exit_code)}"
        texts.append("\n".join([f"## {name} ({code})", "", *lines, ""]))
    return "\n".join(texts)


def said() -> Iterator[tuple[str, str]]:
    """Names and texts of the files in tests/golden/said."""
    yield "answers.md", answers()
    yield "draft-counts.md", draft_counts()
    yield "interleaved.md", shams()
    yield "check.md", checks()
