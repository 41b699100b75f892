"""Draft counts: tokens/s by batch size, acceptance by position, times; as blocks, JSON and rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from nwor_bench.analysis.analyse import Analysis, by_position
from nwor_bench.analysis.draft_rates import MIN_JUDGED, RATE_COLUMNS, Worth
from nwor_bench.analysis.draft_tokens import gives_tokens, named_rates
from nwor_bench.analysis.effects import PairEffect, switch_cost
from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import WindowTime, batch_size
from nwor_bench.records.cell import (
    AA,
    ADAPTIVE,
    Count,
    Fixed,
    count_order,
    method_of,
    number_of,
)
from nwor_bench.records.header import PairFacts
from nwor_bench.records.lines import batch_key
from nwor_bench.records.types import Verdict, WindowRecord
from nwor_bench.report.answer import on_cpu
from nwor_bench.report.document import (
    Block,
    Definitions,
    Figure,
    Paragraph,
    Section,
    Table,
    table,
)
from nwor_bench.report.facts import told_of, warned
from nwor_bench.report.html import colour
from nwor_bench.report.text import NOT_MEASURED, decimal, interval, joined, percent, plural
from nwor_bench.report.worth_answer import (
    drafter_shares,
    line_blocks,
    line_config,
    method_lines,
    sizes_of,
    worth_answer,
)
from nwor_bench.stats.interval import ENDS, Interval, flat

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ON_CPU = "the times judge this CPU with vLLM's attention, no GPU; NWOR is off"
STAGED_ON_CPU = "the times are those of a reference attention, so of the harness"

VERDICTS = (
    "Intervals hold for all draft counts of a batch size together (95 %, Bonferroni). "
    f"FASTER and SLOWER need {MIN_JUDGED} groups or blocks, an interval without 1, and a "
    "difference beyond the noise, the farther end of the interval of k = 0 over itself. "
)

HOW = VERDICTS + (
    "Times are compared between neighbouring windows; tokens a window come from whole batches at "
    "one draft count, and their error is that over prompts."
)

HOW_BY_ENGINES = VERDICTS + (
    "Each draft count, or each method, has an engine, and plain decoding (k = 0) one without a "
    "drafter. In every block all run the same prompts, in random order. Time of a window: a "
    "request's time per output token after its first, as vLLM reports it, times its tokens a "
    "window. The error of tokens is that over prompts, that of times the scatter of blocks. "
    "Engines may differ by themselves, so each interval is wider by the noise."
)

LINE_NOTE = Paragraph(
    "The line for vLLM takes a larger k only if its gain is beyond interval and noise, otherwise "
    "the smaller one. Above the largest batch size measured vLLM goes on with the last k."
)

MAX_SIZES = 4
"""The first screen shows no more batch sizes."""

PLAIN = "plain"
"""Plain decoding among methods."""

ONE_ENGINE = Paragraph(
    "Memory had no room for a second engine without a drafter: the noise is that of one engine "
    "with itself, and what two engines differ by is not known and in no interval."
)


def worth_screen(measured: MeasuredWorth) -> list[Block]:
    """The best draft count of each batch size, the line for vLLM, and what they rest on."""
    worth, header = measured.worth, measured.header
    graphs = header.engine.cuda_graphs
    captured = None if graphs is None else graphs.largest_window
    line = line_blocks(worth, header.pair, staged=not on_cpu(header), captured=captured)
    if header.pair.arms:
        return [_best_methods(worth), *line, _facts(measured)]
    return [*_best_table(worth), *line, *_curve(worth), _facts(measured)]


def _shown(worth: Worth) -> list[tuple[int, Fixed | None]]:
    """The best count by batch size, None if it is not known; of many sizes of the smallest and
    largest two."""
    every = [(size, worth.best.get(size)) for size in worth.ran]
    return every if len(every) <= MAX_SIZES else [*every[:2], *every[-2:]]


def _best_table(worth: Worth) -> Iterator[Table]:
    """The draft count to use at each batch size, and what it gives."""
    known = {(rate.requests, rate.drafts): rate for rate in worth.rates if not rate.adaptive}
    rows = []
    for size, k in _shown(worth):
        rate = known.get((size, number_of(k)))
        gives = ["1" if k == 0 else NOT_MEASURED] * 3
        if rate is not None:
            gives = [interval(rate.ratio, 2), decimal(rate.tokens, 2), decimal(rate.time_ratio, 2)]
        rows.append([worth.sizes(size), NOT_MEASURED if k is None else str(k), *gives])
    if rows:
        heads = ["Requests", "Best k", "Over k = 0", "Tokens", "Time"]
        caption = "Tokens/s over k = 0; tokens and time of a window"
        yield table(heads, rows, caption=caption + _left(worth))


def _best_methods(worth: Worth) -> Table:
    """The method and draft count to use at each batch size, and the best of the others."""
    ratios, rows = worth.ratios, []
    for size, best in _shown(worth):
        row = [*[NOT_MEASURED] * 4, str(Verdict.AMBIGUOUS)]
        if best is not None:
            other, over, verdict = worth.next_best[size]
            gives = interval(ratios[size, best], 2) if best else "1"
            row = [str(best or PLAIN), gives, str(other or PLAIN), interval(over, 2), str(verdict)]
        rows.append([worth.sizes(size), *row])
    heads = ["Requests", "Best", "Over plain", "Next method", "Best over next", "Verdict"]
    caption = "Tokens/s of the best over plain decoding and the next method"
    return table(heads, rows, caption=caption + _left(worth))


def _left(worth: Worth) -> str:
    """How many batch sizes the table leaves to the report."""
    left = len(worth.ran) - len(_shown(worth))
    return f" ({left} more sizes in the report)" if left else ""


def _facts(measured: MeasuredWorth) -> Definitions:
    """What the answer rests on: its reasons, the noise, the strongest warning."""
    worth, header = measured.worth, measured.header
    entries = [
        told_of(header, sizes_of(worth, worth.ran) if worth.ran else ""),
        *worth_answer(measured).facts,
        *_server(measured),
        *_noise(measured),
    ]
    if on_cpu(header):
        entries.append(("CPU", STAGED_ON_CPU if measured.staged else ON_CPU))
    entries += warned(measured.analyses)
    if not worth.by_engines and "but" not in dict(entries):  # which says so
        entries.append(("next", "compare with plain decoding: nwor-bench worth --engines"))
    return Definitions(tuple(entries))


def _noise(measured: MeasuredWorth) -> Iterator[tuple[str, str]]:
    """The noise of each group of engines; of all if they were up at once."""
    groups: dict[str | None, dict[int, Interval]] = {}
    for each in measured.analyses:
        own = groups.setdefault(each.run.header.spec.engines_at_once, {})
        own |= {} if each.worth is None else each.worth.noise
    if len(groups) > 1:
        yield "groups", "each has its own plain decoding; methods of two are compared through it"
    for names, noise in groups.items():
        for note in noise_note(replace(measured.worth, noise=noise) if names else measured.worth):
            yield "noise", f"{names}: {note.text}" if names else note.text


def worth_section(measured: MeasuredWorth) -> Section:
    """All draft counts, acceptance and times, and what the numbers are of."""
    worth, header, stages = measured.worth, measured.header, bool(measured.staged)
    blocks: list[Block] = [rates_table(worth, stages=stages)]
    lone = [a for a in measured.analyses if AA not in (a.run.header.engine.arms or ())]
    if worth.by_engines and lone:
        blocks.append(ONE_ENGINE)
    blocks += [Paragraph(HOW_BY_ENGINES if worth.by_engines else HOW), *_stage_note(measured)]
    blocks += [_acceptance(measured.analyses), Paragraph(_tokens_note(worth, measured.analyses))]
    blocks += [LINE_NOTE, *_times(measured.times)]
    if not worth.by_engines:
        share = max(drafter_shares(measured.times).values(), default=None)
        most = "" if share is None else f" (with the host's work at most {percent(share, 0)} of it)"
        blocks.append(about_zero(header.pair, most))
    effects = [effect for analysis in measured.analyses for effect in analysis.effects]
    return Section("Draft counts", (*blocks, *_switch_note(effects)), brief=True)


def rates_table(worth: Worth, *, stages: bool = False) -> Table:
    """Tokens/s over k = 0 with verdicts, and what they are made of, by batch size and count."""
    rows = [
        [worth.sizes(r.requests), str(r.count), r.verdict,
         interval(r.ratio, 2),
         decimal(r.tokens, 2), decimal(r.time_ratio, 2), str(r.groups),
         *((r.stage_verdict or NOT_MEASURED, interval(r.staged, 3)) if stages else ())]
        for r in worth.rates
    ]  # fmt: skip
    over = "plain decoding" if any(rate.method for rate in worth.rates) else "k = 0"
    heads = ["Requests", "k", "Verdict", f"Tokens/s over {over}", "Tokens", "Time",
             "Blocks" if worth.by_engines else "Groups"]  # fmt: skip
    caption = f"Tokens: of a request in a window. Time: of a window over that at {over}"
    if stages:
        heads += ["Staged", "Tokens/s, staged over not"]
    return replace(table(heads, rows, numbers_from=3, caption=caption), result=3)


def _stage_note(measured: MeasuredWorth) -> Iterator[Paragraph]:
    """What the staged columns compare, and why some have no ratio."""
    staged = measured.staged
    if not staged:
        return
    reasons = Counter(cell.reason for cell in staged.values() if cell.rate is None)
    left = [f"{plural(number, 'cell')}: {reason}" for reason, number in reasons.items() if reason]
    without = f" Without a ratio: {'; '.join(left)}." if left else ""
    modes = joined(sorted({f"{c.nwor_mode} x {c.scv_mode}" for c in staged.values()}))
    yield Paragraph(
        f"Staged ({modes}): windows of one k alternate between staged and not. The gate has "
        "compared tokens, acceptance and K/V of both, so the ratio of tokens/s is that of their "
        f"times. A difference below the noise of k = 0 over itself is AMBIGUOUS.{without}"
    )


def _curve(worth: Worth) -> Iterator[Figure]:
    """Tokens/s over k = 0 by draft count, a line for each batch size."""
    lines = [
        (size, [(rate.drafts, rate.ratio) for rate in points if rate.ratio and not rate.adaptive])
        for size, points in groupby(worth.rates, key=lambda rate: rate.requests)
    ]
    lines = [(size, points) for size, points in lines if points]
    if not lines:
        return
    tints = ("text", "faster", "slower", "ambiguous", "same", "soft")

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        axes.axhline(1, color=colour("soft"), lw=1.5, ls=":")
        for place, (size, points) in enumerate(lines):
            aside = 0.05 * (place - (len(lines) - 1) / 2)
            axes.errorbar(
                [0, *(drafts + aside for drafts, _ in points)],
                [1, *(ratio.value for _, ratio in points)],
                yerr=[[0, *(ratio.value - ratio.low for _, ratio in points)],
                      [0, *(ratio.high - ratio.value for _, ratio in points)]],
                label=plural(size, "request"),
                color=colour(tints[place % len(tints)]), marker="osD^v<"[place % 6], lw=1.5,
                capsize=3,
            )  # fmt: skip
        axes.set_xticks(sorted({0, *(rate.drafts for rate in worth.rates)}))
        axes.set_xlabel("drafts per request and window (k)")
        axes.set_ylabel("tokens/s / that of k = 0")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)

    words = "; ".join(
        f"{plural(size, 'request')}, k = {drafts}: {ratio.value:.2f}"
        for size, points in lines
        for drafts, ratio in points
    )
    yield Figure(
        name="worth",
        caption="Tokens/s over k = 0 by draft count, with the table's intervals.",
        alternative=f"Tokens/s over k = 0. {words}.",
        draw=draw,
        height=320,
        width=480,
    )


def _times(times: Sequence[WindowTime]) -> Iterator[Table]:
    """The target's time and the rest, if they were timed apart."""
    rows = [
        [str(t.requests), f"{t.drafts}{', staged' if t.staged else ''}", decimal(t.window_ms),
         decimal(t.target_ms), decimal(t.window_ms - t.target_ms)]
        for t in times
        if t.target_ms is not None
    ]  # fmt: skip
    if rows:
        heads = ["Requests", "k", "Window ms", "Target ms", "Rest ms"]
        caption = "Median times. Target: forward and sampling. Rest: drafter and host"
        yield table(heads, rows, caption=caption)


def _server(measured: MeasuredWorth) -> Iterator[tuple[str, str]]:
    """Tokens/s with prefill and TTFT at the smallest batch size, its best count and k = 0."""
    size, best = min(measured.worth.best.items(), default=(0, 0))
    for analysis in (each for each in measured.analyses if batch_size(each.run) == size):
        stock = (c for c in analysis.cells if c.batches and c.cell.stock_twin is None)
        cells = {cell.cell.drafts: cell for cell in stock}
        own, plain = cells.get(best), cells.get(0)
        if not (best and own and plain):
            continue
        rates = [decimal(cell.tokens_per_s, 0) for cell in (own, plain)]
        waits = [decimal(cell.ttft_ms_p50) for cell in (own, plain)]
        told = f"{rates[0]} tokens/s with prefill, TTFT {waits[0]} ms"
        at = sizes_of(measured.worth, [size])
        yield "server", f"{told} (k = 0: {rates[1]}, {waits[1]}) at {at}"


def _acceptance(analyses: Sequence[Analysis]) -> Table:
    """Windows of a request in which draft j was accepted, by draft count, in whole batches.

    Not of adaptive verification, under which that depends on the batch size."""
    whole: dict[Fixed, list[WindowRecord]] = {}
    for analysis in analyses:
        windows = windows_by_batch(analysis.run)
        for batch in analysis.run.batches:
            k = batch.cell.drafts if batch.cell.stock_twin is None else 0
            if k is not ADAPTIVE and number_of(k) and gives_tokens(analysis.run, batch):
                whole.setdefault(k or 0, []).extend(windows[batch_key(batch)])
    most = max(map(number_of, whole), default=0)
    rows = [[str(k), *_positions(whole[k], most)] for k in sorted(whole, key=count_order)]
    for method, named in named_rates(analyses[0].run).items():
        shares = [percent(rate) for rate in named[:most]]
        rows.append([f"{method} named" if method else "named", *shares])
    heads = ["k", *(f"draft {j + 1}" for j in range(most))]
    return table(heads, rows, caption="Acceptance by position")


def _positions(windows: Sequence[WindowRecord], most: int) -> list[str]:
    pairs = zip(*by_position(windows), strict=True)
    shares = [percent(a / d if d else None) for d, a in pairs]
    return shares + [NOT_MEASURED] * (most - len(shares))


def _tokens_note(worth: Worth, analyses: Sequence[Analysis]) -> str:
    named = named_rates(analyses[0].run)
    if named and named.keys() == {rate.method for rate in worth.rates}:
        return "Tokens a window are those of the named rates."
    note = f"Tokens a window rest on {plural(worth.texts, 'different prompt')} of all batch sizes."
    if any(rate.adaptive for rate in worth.rates):
        note += " Those of adaptive verification are each batch size's own."
    return note


def worth_result(measured: MeasuredWorth) -> dict[str, Any]:
    """What the runs say, as JSON for scripts."""
    worth, header = measured.worth, measured.header
    return {
        "rates": [rate.to_dict() for rate in worth.rates],
        "noise": {str(size): flat(ratio) for size, ratio in sorted(worth.noise.items())},
        "best": {str(size): number_of(k) for size, k in sorted(worth.best.items())},
        "best_staged": {str(size): number_of(k) for size, k in sorted(worth.best_staged.items())},
        "different_requests": worth.texts,
        "window_times": [vars(time) for time in measured.times],
        "speculative_config": line_config(worth, header.pair),
        **_methods_result(worth, header.pair),
    }


def _methods_result(worth: Worth, pair: PairFacts) -> dict[str, Any]:
    """What is said of several methods, as JSON; nothing for one."""
    if not pair.arms:
        return {}
    beside = {
        str(size): {"count": str(other), **flat(over), "verdict": verdict}
        for size, (other, over, verdict) in worth.next_best.items()
    }
    return {
        "best_method": {str(size): method_of(k) for size, k in worth.best.items()},
        "next_best": beside,
        "speculative_config": [{"requests": n, **own} for n, own in method_lines(worth, pair)],
    }


def worth_rows(measured: MeasuredWorth) -> list[dict[str, Any]]:
    """Rows of worth.csv: each batch size and draft count, k = 0 with its times only."""
    times: dict[tuple[int, Count], WindowTime] = {
        (t.requests, t.drafts): t for t in measured.times if not t.staged
    }
    rates = {(r.requests, r.count): r.to_dict() for r in measured.worth.rates}
    columns = [name for name in RATE_COLUMNS if name not in ("adaptive", "method")]
    rows, noise = [], measured.worth.noise
    places = rates.keys() | times.keys()
    for requests, drafts in sorted(places, key=lambda at: (at[0], count_order(at[1]))):
        own = {"drafts": number_of(drafts), "adaptive": False, "method": method_of(drafts)}
        place: dict[str, Any] = {"requests": requests, **own}
        time, rate = times.get((requests, drafts)), rates.get((requests, drafts), place)
        rows.append({
            **{name: rate.get(name) for name in columns},
            "window_ms": None if time is None else time.window_ms,
            "target_ms": None if time is None else time.target_ms,
            "adaptive": rate["adaptive"],
            "method": rate["method"],
            **flat(noise.get(requests), [f"noise_{name}" for name in ENDS]),
        })  # fmt: skip
    return rows


def about_zero(pair: PairFacts, share: str = "") -> Paragraph:
    """What k = 0 is. `share`: how much of a step that pass may take, if it was measured."""
    return Paragraph(
        "k = 0 is vLLM's own with a drafter loaded: the drafter still runs one pass in each step "
        f"to keep its cache filled{share}. A server without speculation saves that too, so the "
        "ratios above are over a k = 0 that is slower than plain decoding by up to that pass "
        f"(method {pair.method}). nwor-bench worth --engines compares with plain decoding."
    )


def noise_note(worth: Worth) -> Iterator[Paragraph]:
    """How far k = 0 was from itself, if that was measured."""
    if worth.noise:
        size = max(worth.noise, key=lambda size: worth.noise[size].half_width)
        more = ", the widest" if len(worth.noise) > 1 else ""
        yield Paragraph(
            f"k = 0 over itself {interval(worth.noise[size], 2)} at {sizes_of(worth, [size])}{more}"
        )


SWITCHED = {
    True: "The first window after a change of k is left out: it took {} times as long as the next.",
    False: "If k = 0 follows k = 0, it took {} times as long.",
}
"""What a change of k costs the window behind it, and an A/A arm that changes nothing."""


def _switch_note(effects: Sequence[PairEffect]) -> Iterator[Paragraph]:
    costs = {counts: switch_cost(effects, counts=counts) for counts in SWITCHED}
    if told := [
        SWITCHED[counts].format(interval(cost))
        for counts, cost in costs.items()
        if cost is not None
    ]:
        yield Paragraph(" ".join(told))
