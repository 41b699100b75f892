"""Draft counts in a running server as a document and as JSON.

The sentence, the table and the line for vLLM are those of `nwor-bench worth`.
"""

from datetime import timedelta
from typing import Any

from nwor_bench.analysis.draft_rates import Rate
from nwor_bench.cli.live_drafts import DraftReading
from nwor_bench.cli.live_server import Ended, Seen, Wanted
from nwor_bench.cli.live_text import ENDINGS
from nwor_bench.errors import ExitCode
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.types import Verdict
from nwor_bench.report.answer import Answer
from nwor_bench.report.document import Block, Bullets, Document, Headline, Paragraph
from nwor_bench.report.draft_line import line_blocks, speculative_config
from nwor_bench.report.text import NOT_MEASURED, plural, with_bounds
from nwor_bench.report.worth import ON_CPU, about_zero, noise_note, rates_table
from nwor_bench.report.worth_answer import worth_sentence

HOW = (
    "Intervals hold for all draft counts of a class of batch sizes together (95 %, Bonferroni). "
    "Times are compared between neighbouring windows. Tokens a window come from spans of windows "
    "at one draft count, from the fifth on; they are those of your traffic."
)


def answer(seen: Seen[DraftReading], wanted: Wanted) -> Answer:
    """Does speculation pay, up to how many requests, and with how many drafts?"""
    return worth_sentence(seen.reading.worth(wanted.num_reqs))


def exit_code(seen: Seen[DraftReading], wanted: Wanted, *, strict: bool) -> ExitCode:
    """Exit code of the command; with `strict` 5 unless some draft count pays or all cost."""
    codes = {Ended.GONE: ExitCode.FAILED, Ended.INTERRUPTED: ExitCode.INTERRUPTED}
    unsure = answer(seen, wanted).badge == Verdict.AMBIGUOUS
    return codes.get(seen.ended, ExitCode.INCONCLUSIVE if strict and unsure else ExitCode.OK)


def document(seen: Seen[DraftReading], wanted: Wanted, *, quiet: bool = False) -> Document:
    """The answer and why it ended; then, unless `quiet`, the table, the line and the rest."""
    reading, found = seen.reading, answer(seen, wanted)
    lead: list[Block] = [Headline(found.badge, found.sentence)]
    if seen.ended in ENDINGS:
        lead.append(Paragraph(ENDINGS[seen.ended]))
    if not quiet:
        worth = reading.worth(wanted.num_reqs)
        if worth.rates:
            lead += [rates_table(worth), Paragraph(HOW)]
            lead += [ON_CPU] if reading.clock == "host" else []
            lead += [
                *line_blocks(worth, reading.pair),
                about_zero(reading.pair),
                *noise_note(worth),
            ]
        lead.append(Bullets(tuple(status_lines(reading))))
    return Document("Draft counts in a running server", tuple(lead))


def status_lines(reading: DraftReading) -> list[str]:
    """Windows by draft count, groups left out and why, and which clock timed the windows."""
    windows = ", ".join(f"{count:,} at k = {k}" for k, count in reading.windows.items())
    left = [f"{number:,} {in_words(why)}" for why, number in reading.left_out.items()]
    lines = [
        f"Windows: {windows}.",
        f"Groups left out: {'; '.join(left) if left else 'none'}. A group is eight windows in a "
        "row without a prefill, all in one class of batch sizes.",
    ]
    if reading.clock is not None:
        lines.append(f"Timed on the {reading.clock}'s clock.")
    return lines


def progress_line(reading: DraftReading, wanted: Wanted, waited_s: float) -> str:
    """One line while it waits."""
    own = reading.of(wanted.num_reqs)
    known = [rate for rate in own.rates if rate.ratio is not None]
    best = max(known, key=lambda rate: rate.ratio or 0.0, default=None)
    told = NOT_MEASURED
    if best is not None:
        bounds = with_bounds(best.ratio or 0.0, best.low, best.high, 2)
        told = f"{bounds} times the tokens/s of k = 0 with k = {best.drafts}"
    groups = plural(own.groups, "group")
    return f"{timedelta(seconds=int(waited_s))}  {own.num_reqs}: {told}, {groups} a draft count"


def _unstaged(rate: Rate) -> dict[str, Any]:
    """Its values without those of staging, which a server does not alternate with draft counts."""
    return {name: value for name, value in vars(rate).items() if not name.startswith("stage_")}


def result(seen: Seen[DraftReading], wanted: Wanted, url: str, exit_code: int) -> dict[str, Any]:
    """The JSON document; docs/json.md lists its keys."""
    found, reading = answer(seen, wanted), seen.reading
    worth = reading.worth(wanted.num_reqs)
    return {
        "url": url,
        "answer": {"badge": found.badge, "sentence": found.sentence, "num_reqs": wanted.num_reqs},
        "rates": [
            {"num_reqs": worth.sizes(rate.requests), **_unstaged(rate)} for rate in worth.rates
        ],
        "best": {worth.sizes(size): k for size, k in sorted(worth.best.items())},
        "speculative_config": speculative_config(worth.schedule, reading.pair),
        "windows": {str(k): count for k, count in reading.windows.items()},
        "left_out": dict(reading.left_out),
        "clock": reading.clock,
        "ended": str(seen.ended),
        "waited_s": round(seen.waited_s, 1),
        "exit_code": exit_code,
    }
