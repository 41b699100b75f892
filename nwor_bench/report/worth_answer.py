"""Draft counts: the sentence that answers, and the line for vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nwor_bench.analysis.draft_rates import MIN_JUDGED, Rate, Worth, best_rate, ranges_of
from nwor_bench.analysis.draft_tokens import named_rates
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import WindowTime, batch_size
from nwor_bench.errors import ExitCode
from nwor_bench.instruments.draft_counts import SAFE_GRAPHS, capture_size
from nwor_bench.records.cell import Count, Fixed, MethodCount, method_of, number_of
from nwor_bench.records.header import PairFacts
from nwor_bench.records.types import Verdict
from nwor_bench.report.answer import Answer
from nwor_bench.report.document import Block, Code, Facts, Paragraph
from nwor_bench.report.text import interval, joined, percent, plural

STAGING = "VLLM_NWOR_MODE=stage VLLM_SCV_MODE=adaptive"
"""The variables of a server that stages."""

CAPTURED = 512
"""Tokens of the largest window that vLLM captures by default; 1,024 on Blackwell."""


def speculative_config(schedule: Sequence[Sequence[int]], pair: PairFacts) -> dict[str, Any] | None:
    """vLLM's speculative_config by the draft counts of batch sizes; None for no speculation."""
    most = max((drafts for _, _, drafts in schedule), default=0)
    if not most:
        return None
    real = {
        name: value
        for name, value in (pair.speculative or {}).items()
        if value != "synthetic" and not name.startswith("synthetic_")
    }
    config: dict[str, Any] = {**real, "method": pair.method}
    if pair.draft is not None:
        config["model"] = pair.draft
    config["num_speculative_tokens"] = most
    if len(schedule) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(row) for row in schedule]
    return config


def line_config(worth: Worth, pair: PairFacts) -> dict[str, Any] | None:
    """vLLM's speculative_config by what was found; None for no speculation. From engines of one
    count each it has one count for all batch sizes (`Worth.best_fixed`)."""
    schedule = worth.schedule
    if _has_one_count(worth):
        schedule = [[1, max(worth.best), number_of(worth.best_fixed)]]
    return speculative_config(schedule, pair)


def method_lines(worth: Worth, pair: PairFacts) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Batch sizes at which a method is the best, and its speculative_config: with a count for each
    if one engine had them all, otherwise a line for each count."""
    lines: dict[tuple[str, int | None], dict[int, Fixed]] = {}
    zeros = {rate.method for rate in worth.rates if rate.is_tax}
    for size, count in sorted(worth.best.items()):
        if (method := method_of(count)) is not None:
            own = None if method in zeros else number_of(count)
            lines.setdefault((method, own), {})[size] = count
    for (method, _), best in lines.items():
        config = speculative_config(ranges_of(best, worth.least), pair.arms[method])
        if config is not None:
            yield list(best), config


def _has_one_count(worth: Worth) -> bool:
    """True if batch sizes ask for several counts, and no engine had several."""
    return len(worth.schedule) > 1 and worth.by_engines


def line_blocks(
    worth: Worth, pair: PairFacts, *, staged: bool = False, captured: int | None = None
) -> Iterator[Block]:
    """The line, and with `staged` that of a server that stages if it is another; for several
    methods that of each which is the best somewhere.

    `captured`: tokens of the largest window that had a graph as it was measured.
    """
    if not worth.best:
        return  # nothing is known
    if pair.arms and any(worth.best.values()):
        for sizes, line in method_lines(worth, pair):
            yield Paragraph(f"For vLLM at {sizes_of(worth, sizes)}:")
            yield _code(line)
            yield from _graphs_note(line, max(sizes), captured or 0)
        return
    config = line_config(worth, pair)
    if _has_one_count(worth):
        yield Paragraph(
            "Every engine had one draft count, so the line has one: a larger k only if its mean "
            "gain over all batch sizes is sure."
        )
    if config is None:
        yield Paragraph("For vLLM: leave --speculative-config out.")
    else:
        yield Paragraph(f"For vLLM, measured up to {plural(max(worth.best), 'request')}:")
        yield _code(config)
        yield from _graphs_note(config, max(worth.best), captured or 0)
    if staged and worth.best_staged:
        yield from _staged_line(worth, pair, config)


def _graphs_note(config: Mapping[str, Any], largest: int, captured: int) -> Iterator[Code]:
    """What a server needs to have the graphs that were measured, and to be safe with them."""
    schedule = config.get("num_speculative_tokens_per_batch_size")
    single = [[1, largest, config["num_speculative_tokens"]]]
    tokens = max(size * (drafts + 1) for _, size, drafts in schedule or single)
    graphs: dict[str, Any] = {}
    if schedule:  # docs/worth.md: with its default ones vLLM 0.32.0 died
        graphs["cudagraph_mode"] = SAFE_GRAPHS
    if CAPTURED < tokens <= captured:
        graphs["max_cudagraph_capture_size"] = capture_size(tokens)
    if graphs:
        yield Code(f"--compilation-config '{json.dumps(graphs)}'  # on a GPU")


def _staged_line(worth: Worth, pair: PairFacts, stock: dict[str, Any] | None) -> Iterator[Block]:
    """The line by the times of staged windows."""
    config = speculative_config(ranges_of(worth.best_staged, worth.least), pair)
    if config == stock:
        yield Paragraph(f"It is the same for a server that stages ({STAGING}).")
    elif config is None:
        yield Paragraph(f"For a server that stages ({STAGING}): leave --speculative-config out.")
    else:
        yield Paragraph(f"For a server that stages ({STAGING}):")
        yield _code(config)


def _code(config: Mapping[str, Any]) -> Code:
    return Code(f"--speculative-config '{json.dumps(config)}'")


def worth_answer(measured: MeasuredWorth) -> Answer:
    """Does speculation pay, and with how many drafts?"""
    counts = [cell for analysis in measured.analyses for cell in analysis.cells if cell.cell.drafts]
    if counts and all(cell.verdict == Verdict.INEFFECTIVE for cell in counts):
        why = (("why", f"{counts[0].reason}"),)
        text = "At no draft count was a draft verified."
        return Answer(str(Verdict.INEFFECTIVE), text, None, ExitCode.INCONCLUSIVE, why)
    broken = [
        ("why", f"{cell.label} at {plural(batch_size(analysis.run), 'request')}: {cell.reason}")
        for analysis in measured.analyses
        for cell in analysis.cells
        if cell.verdict == Verdict.INVALID
    ]
    worth, named = measured.worth, named_rates(measured.analyses[0].run)
    reply = worth_sentence(worth)
    facts: Facts = (*reply.facts, *_plain_decoding(worth, drafter_shares(measured.times)))
    facts += (*_adaptive(worth), *_above(worth), *_taxes(worth), *_left_out(measured))
    for method, rates in named.items():
        shares = joined([percent(rate, 0) for rate in rates])
        of = f"{method}, " if method else ""
        facts += (("accepted", f"{of}synthetic: {shares} of drafts 1 to {len(rates)}"),)
    if broken:
        left = any(rate.ratio is not None for rate in worth.rates)
        facts = (*broken, *((("others", reply.headline.line), *facts) if left else ()))
        end = "left out" if left else "whether speculation pays is not known"
        text = f"{plural(len(broken), 'draft count')} failed the checks: {end}."
        reply = Answer(str(Verdict.INVALID), text)
    return replace(reply, facts=facts)


def _left_out(measured: MeasuredWorth) -> Iterator[tuple[str, str]]:
    """Batch sizes that did not run, and methods without a ratio where others have one."""
    worth = measured.worth
    if measured.left_out:
        sizes = sizes_of(worth, measured.left_out)
        yield "left out", f"{sizes}: NOT MEASURED, --time-budget had no room"
    open_at: dict[str, set[int]] = {}
    for rate in worth.rates:
        if rate.method and rate.requests in worth.best and rate.verdict == Verdict.NOT_MEASURED:
            open_at.setdefault(rate.method, set()).add(rate.requests)
    for method, at in open_at.items():
        told = sizes_of(worth, sorted(at))
        yield "left out", f"{method} at {told}: NOT MEASURED, too few blocks"


def _plain_decoding(worth: Worth, shares: Mapping[int, float]) -> Iterator[tuple[str, str]]:
    """Batch sizes at which the gain over k = 0 may be no more than what k = 0 drafts in vain."""
    small = [
        rate.requests
        for rate in worth.rates
        if rate.count == worth.best.get(rate.requests)
        and rate.requests in shares
        and (rate.ratio.low if rate.ratio else 0.0) * (1 - shares[rate.requests]) <= 1
    ]
    if small:
        at = sizes_of(worth, small) if len(small) < len(worth.best) else "all batch sizes"
        yield "but", f"plain decoding may be as fast at {at} (try --engines)"


def _above(worth: Worth) -> Iterator[tuple[str, str]]:
    """Above which batch size no method pays."""
    paying = [size for size, count in worth.best.items() if count]
    if worth.next_best and paying and max(paying) < max(worth.best):
        yield "above", f"no method pays above {sizes_of(worth, [max(paying)])}"


def _taxes(worth: Worth) -> Iterator[tuple[str, str]]:
    """What a loaded method that drafts nothing costs, by batch size."""
    taxes = [(rate, rate.ratio) for rate in worth.rates if rate.is_tax and rate.ratio]
    for method in dict.fromkeys(rate.method for rate, _ in taxes):
        told = [
            f"{interval(ratio.inverse(), 2)} ({sizes_of(worth, [rate.requests])})"
            for rate, ratio in taxes
            if rate.method == method
        ]
        yield "tax", f"{method} k=0 takes {joined(told)} times plain decoding's time"


def _adaptive(worth: Worth) -> Iterator[tuple[str, str]]:
    """What adaptive verification gives, if it was measured."""
    for rate in worth.rates:
        if rate.adaptive and rate.ratio is not None:
            yield "adaptive", f"{interval(rate.ratio, 2)} at {sizes_of(worth, [rate.requests])}"


def worth_sentence(worth: Worth) -> Answer:
    """What speculation gives at the smallest batch size at which it pays."""
    fixed = [rate for rate in worth.rates if not (rate.adaptive or rate.is_tax)]
    best = best_rate(fixed)
    longer = (("next", "measure longer, or fewer batch sizes"),)
    if best is None:
        text = "Whether speculation pays is not known: too few windows or requests for an interval."
        return Answer(str(Verdict.NOT_MEASURED), text, facts=longer)
    paying = [r for r in fixed if r.ratio is not None and worth.best.get(r.requests) == r.count]
    if paying:
        size = paying[0].requests
        other, _, verdict = worth.next_best.get(size, (0, None, Verdict.FASTER))
        or_next = f" or {label_of_count(other)}" if other and verdict != Verdict.FASTER else ""
        where = f"at {sizes_of(worth, [size])} with {label_of_count(paying[0].count)}{or_next}"
        text = f"{_times(paying[0])} {where}."
        return Answer(str(Verdict.FASTER), text, facts=tuple(_undecided(worth, fixed)))
    rate, _ = best
    where = f"at {sizes_of(worth, [rate.requests])}"
    if all(r.verdict == Verdict.SLOWER for r in fixed):
        return Answer(str(Verdict.SLOWER), f"Do not speculate: at best {_times(rate)} {where}.")
    if rate.groups < MIN_JUDGED:
        few = f"{rate.groups} of the {MIN_JUDGED} groups or blocks that a verdict needs"
        text = f"Whether speculation pays is not known: {few}."
        return Answer(str(Verdict.AMBIGUOUS), text, facts=(*_undecided(worth, fixed), *longer))
    what = "method" if worth.next_best else "draft count"
    text = f"No {what} is shown to pay: at best {_times(rate)}."
    return Answer(str(Verdict.AMBIGUOUS), text)


def _undecided(worth: Worth, fixed: Sequence[Rate]) -> Iterator[tuple[str, str]]:
    """Batch sizes of which the best is not known, and what was measured there."""
    for size in (size for size in worth.ran if size not in worth.best):
        told, found = "NOT MEASURED", best_rate(r for r in fixed if r.requests == size)
        if found is not None:
            rate, ratio = found
            few = plural(rate.groups, "block" if worth.by_engines else "group")
            why = f"{few}, a verdict needs {MIN_JUDGED}" if size in worth.noise else "no valid A/A"
            told = f"at best {ratio.value:.2f} so far, with {label_of_count(rate.count)} ({why})"
        yield "undecided", f"{sizes_of(worth, [size])}: {told}"


def label_of_count(count: Count) -> str:
    """`k = 2`, `eagle3 k=2`."""
    return str(count) if isinstance(count, MethodCount) else f"k = {count}"


def sizes_of(worth: Worth, sizes: Sequence[int]) -> str:
    """`1 request`, `1 and 8 requests`, `1 and 5-8 requests`."""
    named = joined([worth.sizes(size) for size in sizes])
    return f"{named} request{'' if list(sizes) == [1] else 's'}"


def _times(rate: Rate) -> str:
    assert rate.ratio is not None  # a count that pays has one
    low, high = f"{rate.ratio.low:.2f}", f"{rate.ratio.high:.2f}"
    return f"{rate.ratio.value:.2f} times the tokens/s (95 %: {low} to {high})"


def drafter_shares(times: Sequence[WindowTime]) -> dict[int, float]:
    """What of a window at k = 0 is neither the target's forward nor sampling, by batch size."""
    plain = (time for time in times if not time.drafts and time.target_ms)
    return {time.requests: 1 - (time.target_ms or 0.0) / time.window_ms for time in plain}
