"""A live A/B as a document and as JSON."""

from datetime import timedelta
from typing import Any

from nwor_bench.analysis.verdicts import DEFAULT_MARGIN, verdict
from nwor_bench.cli.live_server import ClassRatio, Ended, Reading, Seen, Wanted
from nwor_bench.errors import ExitCode
from nwor_bench.records.fallback_reasons import in_words
from nwor_bench.records.types import Verdict
from nwor_bench.records.window_order import ALL
from nwor_bench.report.answer import CPU_BADGE, CPU_SENTENCE, NOTHING_BADGE, Answer
from nwor_bench.report.document import Block, Bullets, Document, Headline, Paragraph, Table, table
from nwor_bench.report.text import NOT_MEASURED, change, change_range, plural
from nwor_bench.stats.interval import Interval
from nwor_bench.stats.robust import MIN_GROUPS, from_ends

STOPPED_BADGE = "STAGING STOPPED"

ENDINGS = {
    Ended.GONE: "The server no longer answers with these metrics, or no longer updates them; this "
    "is what it said last.",
    Ended.INTERRUPTED: "Interrupted.",
}


def answer(seen: Seen[Reading], wanted: Wanted) -> Answer:
    """Does it pay? In one sentence, to be read after the badge."""
    reading, own = seen.reading, seen.reading.of(wanted.num_reqs)
    if reading.stopped is not None:
        why = in_words(reading.stopped)
        return Answer(
            STOPPED_BADGE,
            f"Staging has stopped for good because {why} ({reading.stopped}). The server goes on "
            "in mode off; its log says more.",
        )
    interval = interval_of(own)
    if interval is None:
        return Answer(NOTHING_BADGE, _nothing(reading, own))
    found = verdict(interval)
    if reading.clock == "host":
        said = f"{_measured(reading, own, interval)}. {CPU_SENTENCE}{_aa_warning(reading)}"
        return Answer(CPU_BADGE, said)
    lead = {
        Verdict.FASTER: "Yes, NWOR pays here",
        Verdict.SLOWER: "No, NWOR does not pay here, it costs time",
        Verdict.SAME: "No, NWOR does not pay here: it makes no difference of more than "
        f"{100 * DEFAULT_MARGIN:g} %",
    }.get(found, "This traffic cannot yet say whether NWOR pays")
    measured = _measured(reading, own, interval)
    return Answer(str(found), f"{lead}: {measured}.{_aa_warning(reading)}")


def exit_code(seen: Seen[Reading], wanted: Wanted, *, strict: bool) -> ExitCode:
    """Exit code of the command; with `strict` 5 unless the verdict is FASTER, SLOWER or SAME."""
    codes = {
        Ended.STOPPED: ExitCode.CORRECTNESS_BROKEN,
        Ended.GONE: ExitCode.FAILED,
        Ended.INTERRUPTED: ExitCode.INTERRUPTED,
    }
    interval = interval_of(seen.reading.of(wanted.num_reqs))
    unsure = interval is None or verdict(interval) is Verdict.AMBIGUOUS
    return codes.get(seen.ended, ExitCode.INCONCLUSIVE if strict and unsure else ExitCode.OK)


def interval_of(own: ClassRatio) -> Interval | None:
    """The class's ratio with its interval; None until there is one."""
    if own.ratio is None or own.low is None or own.high is None:
        return None
    return from_ends(own.ratio, own.low, own.high, own.groups).exp()


def document(seen: Seen[Reading], wanted: Wanted, *, quiet: bool = False) -> Document:
    """The answer and why it ended; then, unless `quiet`, the classes and what is left out."""
    found = answer(seen, wanted)
    lead: list[Block] = [Headline(found.badge, found.sentence)]
    if seen.ended in ENDINGS:
        lead.append(Paragraph(ENDINGS[seen.ended]))
    if not quiet:
        lead += [_classes(seen.reading), Bullets(tuple(status_lines(seen.reading)))]
    return Document("Off against stage in a running server", tuple(lead))


def _classes(reading: Reading) -> Table:
    """Ratio, interval and groups by class of batch sizes."""
    rows = []
    for own in reading.classes.values():
        width = own.half_width
        half = NOT_MEASURED if width is None else f"{100 * width:.2f} %"
        rows.append((own.num_reqs, _ratio(own), half, f"{own.groups:,}"))
    return table(("Requests", "Time in stage / off [95 % interval]", "+-", "Groups"), rows)


def status_lines(reading: Reading) -> list[str]:
    """Groups left out and why, whether staging continues, and which clock timed the windows."""
    left = [f"{number:,} {in_words(why)}" for why, number in reading.left_out.items()]
    lines = [f"Groups left out: {'; '.join(left) if left else 'none'}."]
    lines.append(
        f"Staging: on, stage x {reading.scv_mode} and off x off interleaved."
        if reading.stopped is None
        else f"Staging: stopped for good ({reading.stopped})."
    )
    if reading.fallbacks:
        why, number = next(iter(reading.fallbacks.items()))
        lines.append(f"Written directly: {plural(number, 'window')} because of {why}.")
    lines.append(f"Off against itself (A/A): {_ratio(reading.aa)}, {reading.aa.groups:,} groups.")
    if reading.clock is not None:
        lines.append(f"Timed on the {reading.clock}'s clock.")
    return lines


def progress_line(reading: Reading, wanted: Wanted, waited_s: float) -> str:
    """One line while it waits."""
    own = reading.of(wanted.num_reqs)
    ratio = f"{_ratio(own)} in {plural(own.groups, 'group')}"
    return f"{timedelta(seconds=int(waited_s))}  {own.num_reqs}: {ratio}"


def result(seen: Seen[Reading], wanted: Wanted, url: str, exit_code: int) -> dict[str, Any]:
    """The JSON document; docs/json.md lists its keys."""
    found, reading = answer(seen, wanted), seen.reading
    return {
        "url": url,
        "answer": {"badge": found.badge, "sentence": found.sentence, "num_reqs": wanted.num_reqs},
        "classes": [{"num_reqs": own.num_reqs, **_values(own)} for own in reading.classes.values()],
        "aa": _values(reading.aa),
        "left_out": reading.left_out,
        "staging_stopped": reading.stopped,
        "fallbacks": reading.fallbacks,
        "clock": reading.clock,
        "ended": str(seen.ended),
        "waited_s": round(seen.waited_s, 1),
        "exit_code": exit_code,
    }


def _values(own: ClassRatio) -> dict[str, Any]:
    return {
        "ratio": own.ratio,
        "ratio_ci_low": own.low,
        "ratio_ci_high": own.high,
        "groups": own.groups,
    }


def _measured(reading: Reading, own: ClassRatio, interval: Interval) -> str:
    of = "" if own.num_reqs == ALL else f" of {own.num_reqs} requests"
    return (
        f"in stage x {reading.scv_mode} a window{of} takes {change(interval.value)} time than in "
        f"off x off (95 % confidence: {change_range(interval.low, interval.high)}; "
        f"{plural(own.groups, 'group')})"
    )


def _aa_warning(reading: Reading) -> str:
    """A sentence if off differs from itself."""
    found = interval_of(reading.aa)
    if found is None or found.low <= 1 <= found.high:
        return ""
    return (
        f" But off differs from itself (A/A): {_ratio(reading.aa)} in "
        f"{plural(found.count, 'group')}; trust no difference of that size."
    )


def _nothing(reading: Reading, own: ClassRatio) -> str:
    start = f"Too few groups of windows were compared ({own.groups:,})"
    others = reading.of(ALL).groups
    if not own.groups and others:
        had = "other has" if others == 1 else "others have"
        return f"{start}: {others:,} {had} windows of another size than {own.num_reqs} requests."
    if not own.groups and reading.fallbacks and "fallback" in reading.left_out:
        return f"{start}: no window is staged, because of {next(iter(reading.fallbacks))}."
    if not own.groups and not reading.left_out:
        return f"{start}: the server has run next to no windows. Send it requests."
    return (
        f"{start}, and a ratio needs {MIN_GROUPS}. A group is eight windows in a row without a "
        "prefill, all in one class of batch sizes."
    )


def _ratio(own: ClassRatio) -> str:
    if own.ratio is None or own.low is None or own.high is None:
        return NOT_MEASURED
    return f"{own.ratio:.4f} [{own.low:.4f}, {own.high:.4f}]"
