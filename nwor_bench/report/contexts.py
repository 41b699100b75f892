"""Draft counts at several contexts: the best by context and batch size, and which context changes
it. Other scenarios are compared likewise."""

from collections.abc import Iterator, Mapping

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
    sizes = _sizes(worths)
    rows = []
    for name, measured in worths.items():
        worth = measured.worth
        ratios = {(rate.requests, rate.count): rate.ratio for rate in worth.rates}
        told = {}
        for size, best in worth.best.items():
            ratio = ratios.get((size, best))
            told[size] = f"{ratio.value:.2f}, {label_of_count(best)}" if ratio else NO_DRAFTS
        rows.append([name, *(told.get(size, NOT_MEASURED) for size in sizes)])
    heads = [_word(worths).capitalize(), *(plural(size, "request") for size in sizes)]
    caption = "Tokens/s over k = 0 with the best draft count, by context and batch size"
    return table(heads, rows, numbers_from=1, caption=caption)


def context_sentence(worths: Worths) -> str:
    """At which batch sizes the best draft count depends on the context."""
    if not any(sum(map(len, _by_count(worths, size).values())) > 1 for size in _sizes(worths)):
        return f"Whether the {_word(worths)} changes the best draft count is not known."
    changed = [
        plural(size, "request") for size in _sizes(worths) if len(_by_count(worths, size)) > 1
    ]
    if not changed:
        return f"The {_word(worths)} does not change the best draft count."
    return f"The {_word(worths)} changes the best draft count at {joined(changed)}."


def context_changes(worths: Worths) -> Iterator[tuple[str, str]]:
    """For each batch size at which it changes, the best draft count and its contexts."""
    for size in _sizes(worths):
        if len(found := _by_count(worths, size)) > 1:
            told = [
                f"{label_of_count(k) if k else NO_DRAFTS} at {joined(names)}"
                for k, names in found.items()
            ]
            yield plural(size, "request"), joined(told)


def _sizes(worths: Worths) -> list[int]:
    return sorted({size for measured in worths.values() for size in measured.worth.best})


def _by_count(worths: Worths, size: int) -> dict[Count, list[str]]:
    """Contexts by the best draft count at a batch size."""
    found: dict[Count, list[str]] = {}
    for name, measured in worths.items():
        if (best := measured.worth.best.get(size)) is not None:
            found.setdefault(best, []).append(name)
    return found


def _word(worths: Worths) -> str:
    """`context` if all prompts have a set length."""
    scenarios = [measured.header.scenario or {} for measured in worths.values()]
    lengths = [(scenario.get("prompts") or {}).get("tokens") for scenario in scenarios]
    return "context" if all(lengths) else "scenario"
