"""Draft counts at several contexts, or other scenarios: the best of each, and what changes it."""

from collections.abc import Mapping

from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.records.cell import Count
from nwor_bench.report.document import Table, table
from nwor_bench.report.text import NOT_MEASURED, joined, plural
from nwor_bench.report.worth_answer import label_of_count

Worths = Mapping[str, MeasuredWorth]
"""By scenario."""

NO_DRAFTS = "no drafts"


def context_table(worths: Worths) -> Table:
    """Tokens/s over k = 0 at the best draft count, a row for each context."""
    sizes = sorted({size for measured in worths.values() for size in measured.worth.best})
    rows = []
    for name, measured in worths.items():
        worth = measured.worth
        ratios, told = worth.ratios, {}
        for size, best in worth.best.items():
            ratio = ratios.get((size, best))
            told[size] = f"{ratio.value:.2f}, {label_of_count(best)}" if ratio else NO_DRAFTS
        rows.append([name, *(told.get(size, NOT_MEASURED) for size in sizes)])
    heads = [_word(worths).capitalize(), *(plural(size, "request") for size in sizes)]
    caption = "Tokens/s over k = 0 with the best draft count, by context and batch size"
    return table(heads, rows, numbers_from=1, caption=caption)


def context_answer(worths: Worths) -> tuple[str, list[tuple[str, str]]]:
    """Where the context changes the best draft count, as a sentence; and what it is at each context
    of these batch sizes."""
    found: dict[int, dict[Count, list[str]]] = {}
    for name, measured in worths.items():
        for size, best in measured.worth.best.items():
            found.setdefault(size, {}).setdefault(best, []).append(name)
    changes = []
    for size, by_count in sorted(found.items()):
        told = [
            f"{label_of_count(k) if k else NO_DRAFTS} at {joined(n)}" for k, n in by_count.items()
        ]
        changes += [(plural(size, "request"), joined(told))] if len(told) > 1 else []
    text = "does not change the best draft count"
    if changes:
        text = f"changes the best draft count at {joined([size for size, _ in changes])}"
    elif all(sum(map(len, by_count.values())) < 2 for by_count in found.values()):
        text = "has one value at each batch size whose best is known"
    return f"The {_word(worths)} {text}.", changes


def _word(worths: Worths) -> str:
    """`context` if all prompts have a set length."""
    scenarios = [measured.header.scenario or {} for measured in worths.values()]
    lengths = [(scenario.get("prompts") or {}).get("tokens") for scenario in scenarios]
    return "context" if all(lengths) else "scenario"
