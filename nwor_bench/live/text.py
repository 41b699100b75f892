"""What `nwor-bench live` says of a server: an answer, a document, and JSON.

The sentence, the table and the line for vLLM on draft counts are those of `nwor-bench worth`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from nwor_bench.analysis.draft_rates import Rate, best_rate
from nwor_bench.analysis.verdicts import verdict
from nwor_bench.errors import ExitCode
from nwor_bench.live.reading import ITSELF, CellTimes, Interleaved, Reading
from nwor_bench.live.watch import Ended, Seen, Wanted
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.types import Verdict
from nwor_bench.records.window_order import ALL
from nwor_bench.report.answer import CPU_BADGE, NOTHING_BADGE, Answer
from nwor_bench.report.document import (
    Block,
    Bullets,
    Definitions,
    Document,
    Headline,
    Paragraph,
    Table,
    table,
)
from nwor_bench.report.text import NOT_MEASURED, interval, percent, plural, signed
from nwor_bench.report.worth import ON_CPU, about_zero, noise_note, rates_table
from nwor_bench.report.worth_answer import line_blocks, speculative_config, worth_sentence
from nwor_bench.stats.interval import flat
from nwor_bench.stats.robust import MIN_GROUPS

STOPPED_BADGE = "STAGING STOPPED"

TITLES = {
    Interleaved.MODES: "Off against stage in a running server",
    Interleaved.DRAFTS: "Draft counts in a running server",
}

ENDINGS = {
    Ended.GONE: "The server no longer answers with these metrics, or no longer updates them; this "
    "is what it said last.",
    Ended.INTERRUPTED: "Interrupted.",
}

EXIT_CODES = {
    Ended.STOPPED: ExitCode.CORRECTNESS_BROKEN,
    Ended.GONE: ExitCode.FAILED,
    Ended.INTERRUPTED: ExitCode.INTERRUPTED,
}

HOW_DRAFTS = (
    "Intervals hold for all draft counts of a class of batch sizes together (95 %, Bonferroni). "
    "Times are compared between neighbouring windows. Tokens a window come from spans of windows "
    "at one draft count, from the fifth on; they are those of your traffic."
)


def answer(seen: Seen, wanted: Wanted) -> Answer:
    """Does it pay? In one sentence, to be read after the badge."""
    reading, staged = seen.reading, seen.reading.of(wanted.num_reqs)
    if reading.kind is Interleaved.DRAFTS:
        return worth_sentence(reading.worth(wanted.num_reqs))
    if reading.stopped is not None:
        text = f"for good, because {in_words(reading.stopped)}; the server goes on in mode off."
        log = (("log", f"the server's log says more ({reading.stopped})"),)
        return Answer(STOPPED_BADGE, text, facts=log)
    if staged.ratio is None:
        return Answer(NOTHING_BADGE, _nothing(reading, wanted.num_reqs))
    of = "" if wanted.num_reqs == ALL else f" of {wanted.num_reqs} requests"
    change = signed(staged.ratio.value, staged.ratio if staged.ratio.is_bounded else None)
    measured = f"time of a window{of} {change} in stage x {reading.scv_mode}"
    facts = (("rests on", plural(staged.groups, "group")), *_aa_warning(reading))
    if reading.clock == "host":
        return Answer(CPU_BADGE, f"{measured}; a CPU times the harness.", facts=facts)
    return Answer(str(verdict(staged.ratio)), f"{measured}.", facts=facts)


def exit_code(seen: Seen, wanted: Wanted, *, strict: bool) -> ExitCode:
    """Exit code of the command; with `strict` 5 if nothing was compared or the verdict is open."""
    unsure = strict and _verdict(seen, wanted) in (None, Verdict.AMBIGUOUS, Verdict.NOT_MEASURED)
    return EXIT_CODES.get(seen.ended, ExitCode.INCONCLUSIVE if unsure else ExitCode.OK)


def _verdict(seen: Seen, wanted: Wanted) -> str | None:
    """FASTER, SLOWER, SAME or AMBIGUOUS, on a CPU too; None if nothing was compared."""
    if seen.reading.kind is Interleaved.DRAFTS:
        return answer(seen, wanted).badge
    ratio = seen.reading.of(wanted.num_reqs).ratio
    return None if ratio is None else verdict(ratio)


def document(seen: Seen, wanted: Wanted, *, quiet: bool = False) -> Document:
    """The answer and why it ended; then, unless `quiet`, the table and the rest."""
    reading, reply = seen.reading, answer(seen, wanted)
    blocks: list[Block] = [Headline(reply.badge, reply.sentence)]
    if seen.ended in ENDINGS:
        blocks.append(Paragraph(ENDINGS[seen.ended]))
    if not quiet:
        blocks.append(Definitions((*reply.facts, *_server_facts(seen), *_drift_facts(seen))))
        is_modes = reading.kind is Interleaved.MODES
        blocks += [_ratios(reading)] if is_modes else _drafts_blocks(reading, wanted)
        blocks.append(Bullets(tuple(status_lines(reading))))
    return Document(TITLES[reading.kind], tuple(blocks))


def _ratios(reading: Reading) -> Table:
    """Ratio, interval and groups of stage by class of batch sizes."""
    rows = []
    for size in reading.classes:
        staged, width = reading.of(size), reading.half_width(size)
        half = NOT_MEASURED if width is None else f"{100 * width:.2f} %"
        rows.append((size, _ratio(staged), half, f"{staged.groups:,}"))
    return table(("Requests", "Time in stage / off [95 % interval]", "+-", "Groups"), rows)


def _drafts_blocks(reading: Reading, wanted: Wanted) -> list[Block]:
    """Rates by class and draft count, and the line for vLLM; none if no class is known."""
    worth = reading.worth(wanted.num_reqs)
    if not worth.rates:
        return []
    return [
        rates_table(worth),
        Paragraph(HOW_DRAFTS),
        *([Paragraph(f"On a CPU {ON_CPU}.")] if reading.clock == "host" else []),
        *line_blocks(worth, reading.pair),
        about_zero(reading.pair),
        *(Paragraph(f"Noise: {note.text}.") for note in noise_note(worth)),
    ]


def status_lines(reading: Reading) -> list[str]:
    """Groups left out and why, what is interleaved, and which clock timed the windows."""
    left = [f"{number:,} {in_words(why)}" for why, number in reading.left_out.items()]
    lines = [f"Groups left out: {'; '.join(left) if left else 'none'}."]
    if reading.kind is Interleaved.DRAFTS:
        windows = ", ".join(f"{count:,} at k = {k}" for k, count in reading.windows.items())
        lines.insert(0, f"Windows: {windows}.")
        lines[-1] += (
            " A group is twelve windows in a row without a prefill, all in one class of batch "
            "sizes."
        )
    else:
        lines[-1] += (
            " A group is eight windows in a row without a prefill, all in one class of batch sizes."
        )
        lines += _staging_lines(reading)
    if reading.clock is not None:
        lines.append(f"Timed on the {reading.clock}'s clock.")
    return lines


def _staging_lines(reading: Reading) -> list[str]:
    """State of staging, what is written directly, and how far off is from itself."""
    lines = [
        f"Staging: on, stage x {reading.scv_mode} and off x off interleaved."
        if reading.stopped is None
        else f"Staging: stopped for good ({reading.stopped})."
    ]
    if reading.fallbacks:
        why, number = next(iter(reading.fallbacks.items()))
        lines.append(f"Written directly: {plural(number, 'window')} because of {why}.")
    aa = reading.of(ALL, ITSELF)
    return [*lines, f"Off against itself (A/A): {_ratio(aa)}, {aa.groups:,} groups."]


def progress_line(reading: Reading, wanted: Wanted, waited_s: float) -> str:
    """One line while it waits."""
    size, groups = wanted.num_reqs, plural(reading.groups(wanted.num_reqs), "group")
    if reading.kind is Interleaved.MODES:
        told = f"{_ratio(reading.of(size))} in {groups}"
    else:
        told = f"{_best_rate(reading.rates(size))}, {groups} a draft count"
    return f"{timedelta(seconds=int(waited_s))}  {size}: {told}"


def _best_rate(rates: Sequence[Rate]) -> str:
    best = best_rate(rates)
    if best is None:
        return NOT_MEASURED
    rate, ratio = best
    return f"{interval(ratio, 2)} times the tokens/s of k = 0 with k = {rate.drafts}"


def result(seen: Seen, wanted: Wanted, url: str, exit_code: int) -> dict[str, Any]:
    """The JSON document; docs/json.md lists its keys."""
    reply, reading = answer(seen, wanted), seen.reading
    measured = _modes_result if reading.kind is Interleaved.MODES else _drafts_result
    return {
        "url": url,
        "answer": {"badge": reply.badge, "sentence": reply.sentence, "num_reqs": wanted.num_reqs},
        **measured(reading, wanted),
        "drift": [
            asdict(drift) | {"drifted": drift.trend.matters} for drift in seen.over_time.drifts()
        ],
        "clock": reading.clock,
        "ended": str(seen.ended),
        "waited_s": round(seen.waited_s, 1),
        "exit_code": exit_code,
    }


def _modes_result(reading: Reading, _: Wanted) -> dict[str, Any]:
    return {
        "classes": [{"num_reqs": size, **_values(reading.of(size))} for size in reading.classes],
        "aa": _values(reading.of(ALL, ITSELF)),
        "left_out": reading.left_out,
        "staging_stopped": reading.stopped,
        "fallbacks": reading.fallbacks,
    }


def _values(cell: CellTimes) -> dict[str, Any]:
    return {
        **flat(cell.ratio, ("ratio", "ratio_ci_low", "ratio_ci_high")),
        "groups": cell.groups,
    }


def _drafts_result(reading: Reading, wanted: Wanted) -> dict[str, Any]:
    """Rates without staging's values: a server does not interleave it with draft counts."""
    worth = reading.worth(wanted.num_reqs)
    rates = [
        {name: value for name, value in rate.to_dict().items() if not name.startswith("stage_")}
        for rate in worth.rates
    ]
    return {
        "rates": [{"num_reqs": worth.sizes(rate["requests"]), **rate} for rate in rates],
        "best": {worth.sizes(size): k for size, k in sorted(worth.best.items())},
        "speculative_config": speculative_config(worth.schedule, reading.pair),
        "windows": {str(k): count for k, count in reading.windows.items()},
        "left_out": reading.left_out,
    }


def _server_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    """What users felt since the first reading; nothing of a server that restarted."""
    before, after = seen.first and seen.first.felt, seen.reading.felt
    grown = [new - old for new, old in zip(after or (), before or (), strict=False)]
    if grown and min(grown) >= 0 and grown[0] and grown[2] and seen.waited_s:
        asked, hits, requests, ttft_s, tokens = grown
        told = f"{tokens / seen.waited_s:.0f} tokens/s with prefills and pauses, mean TTFT "
        told += f"{1e3 * ttft_s / requests:.0f} ms, prefix hits {percent(hits / asked, 0)}"
        yield "server", told


def _drift_facts(seen: Seen) -> Iterator[tuple[str, str]]:
    """A fact for each rate that could drift, once the watch is long enough."""
    over = timedelta(seconds=int(seen.waited_s))
    for drift in seen.over_time.drifts():
        change = signed(1 + drift.trend.drift) if drift.trend.matters else "no drift found"
        thirds = f"first third {drift.first:.3g}, last {drift.last:.3g}"
        yield "over time", f"{drift.what} {change} in {over}; {thirds}"


def _aa_warning(reading: Reading) -> Iterator[tuple[str, str]]:
    """A fact if off differs from itself."""
    aa = reading.of(ALL, ITSELF)
    if aa.ratio is not None and not aa.ratio.holds(1):
        groups = plural(aa.groups, "group")
        yield "warning", f"off over itself {_ratio(aa)} in {groups}: trust no such difference"


def _nothing(reading: Reading, num_reqs: str) -> str:
    groups, others = reading.of(num_reqs).groups, reading.of(ALL).groups
    start = f"Too few groups of windows were compared ({groups:,})"
    if not groups and others:
        had = "other has" if others == 1 else "others have"
        return f"{start}: {others:,} {had} windows of another size than {num_reqs} requests."
    if not groups and reading.fallbacks and "fallback" in reading.left_out:
        return f"{start}: no window is staged, because of {next(iter(reading.fallbacks))}."
    if not groups and not reading.left_out:
        return f"{start}: the server has run next to no windows. Send it requests."
    return f"{start}, and a ratio needs {MIN_GROUPS}."


def _ratio(cell: CellTimes) -> str:
    if cell.ratio is None:
        return NOT_MEASURED
    return f"{cell.ratio.value:.4f} [{cell.ratio.low:.4f}, {cell.ratio.high:.4f}]"
