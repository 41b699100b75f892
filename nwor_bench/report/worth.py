"""Draft counts: the answer, tokens/s by batch size, acceptance by position, the line for vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Any

from nwor_bench.analysis.analyse import Analysis, by_position
from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.invariants import windows_by_batch
from nwor_bench.analysis.served import served_ratios
from nwor_bench.analysis.worth import (
    Measured,
    batch_size,
    named_rates,
    same_places,
    worth_of,
)
from nwor_bench.instruments.robust import RatioInterval
from nwor_bench.records.header import PairFacts, RunHeader
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import Phase, Verdict, WindowRecord
from nwor_bench.report.answer import Answer, on_cpu
from nwor_bench.report.document import (
    Block,
    Callout,
    Code,
    Figure,
    Paragraph,
    Table,
    table,
)
from nwor_bench.report.figures import colour
from nwor_bench.report.text import NOT_MEASURED, decimal, joined, percent, plural, with_bounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ON_CPU = Callout(
    "Measured on a CPU",
    "These times judge this CPU, with vLLM's own attention. They do not carry over to a GPU. NWOR "
    "is off throughout.",
)

HOW = (
    "Intervals hold for all draft counts of a batch size together (95 %, Bonferroni). Times are "
    "compared between neighbouring windows; tokens a window come from whole batches at one draft "
    "count, and their error is that over requests."
)


def by_drafts(header: RunHeader) -> bool:
    """True for a run whose cells are draft counts."""
    return (header.spec or {}).get("draft_counts") is not None


def measured_worth(analyses: Sequence[Analysis]) -> Worth:
    """What the runs of one pair say together."""
    return worth_of([Measured(each.run, each.effects) for each in analyses])


def worth_answer(analyses: Sequence[Analysis]) -> Answer:
    """Does speculation pay, up to how many requests, and with how many drafts?"""
    broken = [
        f"{cell.label} at {_requests(each.run)}: {cell.reason}"
        for each in analyses
        for cell in each.cells
        if cell.verdict == Verdict.INVALID
    ]
    if broken:
        text = "Whether speculation pays is not known, because draft counts failed their checks: "
        return Answer(str(Verdict.INVALID), f"{text}{'; '.join(broken)}.")
    worth, rates = measured_worth(analyses), named_rates(analyses[0].run)
    found = worth_sentence(worth)
    said = [found.sentence, *_plain_decoding(worth, _drafter_shares(_parts_of(analyses)))]
    if rates is not None:
        shares = joined([percent(rate, 0) for rate in rates])
        drafts = f"drafts 1 to {len(rates)}"
        said.append(f"Acceptance is synthetic: {shares} of windows accept {drafts}.")
    return Answer(found.badge, " ".join(said))


def _plain_decoding(worth: Worth, shares: Mapping[int, float]) -> Iterator[str]:
    """Batch sizes at which the gain over k = 0 may be no more than what k = 0 drafts in vain."""
    small = [
        rate.requests
        for rate in worth.rates
        if rate.drafts == worth.best[rate.requests]
        and rate.requests in shares
        and (rate.low or 0.0) * (1 - shares[rate.requests]) <= 1
    ]
    if small:
        most = percent(max(shares[size] for size in small), 0)
        yield (
            f"At {_sizes(worth, small)} a server without a drafter may be as fast: at k = 0 the "
            f"drafter still runs once a step, with the host's work up to {most} of its time."
        )


def worth_sentence(worth: Worth) -> Answer:
    """Up to how many requests speculation pays, and what it gives there."""
    known = [rate for rate in worth.rates if rate.ratio is not None]
    if not known:
        return Answer(
            str(Verdict.AMBIGUOUS),
            "This does not show whether speculation pays: there are too few windows or requests "
            "for an interval. Measure longer.",
        )
    paying = [r for r in known if worth.best[r.requests] == r.drafts]
    slower = [rate for rate in known if rate.verdict == Verdict.SLOWER]
    if paying:
        ends = [paying[0]] if len(paying) == 1 else [paying[0], paying[-1]]
        text = f"Speculate {_where(worth)}: {ends[0].ratio:.2f} times the tokens/s of k = 0"
        text += f" {_at(worth, ends[0])}"
        text += "".join(f", {rate.ratio:.2f} times {_at(worth, rate)}" for rate in ends[1:])
        rest = [size for size, k in sorted(worth.best.items()) if not k]
        if rest:
            text += f"; at {_sizes(worth, rest)} no draft count is shown to pay"
        return Answer(str(Verdict.FASTER), f"{text}.")
    best = max(known, key=lambda rate: rate.ratio or 0.0)
    bounds = with_bounds(best.ratio or 0.0, best.low, best.high, 2)
    if len(slower) == len(worth.rates):
        text = f"Do not speculate here: at best it gives {bounds} times the tokens/s of k = 0"
        return Answer(str(Verdict.SLOWER), f"{text}, {_at(worth, best)}.")
    text = f"No draft count is shown to pay here. The best has {bounds} times the tokens/s of k = 0"
    return Answer(str(Verdict.AMBIGUOUS), f"{text}, {_at(worth, best)}.")


def _where(worth: Worth) -> str:
    sizes = sorted(worth.best)
    pays = [size for size in sizes if worth.best[size]]
    if pays == sizes[: len(pays)]:
        return f"up to {plural(pays[-1], 'request')}"
    return f"at {_sizes(worth, pays)}"


def _sizes(worth: Worth, sizes: Sequence[int]) -> str:
    """`1 request`, `1 and 8 requests`, `1 and 5-8 requests`."""
    named = joined([worth.sizes(size) for size in sizes])
    return f"{named} request{'' if list(sizes) == [1] else 's'}"


def _at(worth: Worth, rate: Rate) -> str:
    return f"at {_sizes(worth, [rate.requests])} with k = {rate.drafts}"


def _requests(run: RunData) -> str:
    return plural(batch_size(run), "request")


def served_note(rows: Sequence[Mapping[str, Any]]) -> Iterator[Paragraph]:
    """What the line gave on an open loop; nothing if none ran."""
    found = served_ratios(rows)
    if not found:
        return
    told = [
        f"{_over(each.tpot)} times the time per output token of a fixed {each.over}, and "
        f"{_over(each.tokens_per_s)} times its tokens/s"
        for each in found
    ]
    fixed = "" if len(found) > 1 else " The line is the best fixed k at every size."
    yield Paragraph(
        f"Served, requests coming at random times ({plural(found[0].blocks, 'block')} of "
        f"{plural(found[0].requests, 'request')}, at light to heavy load): the line takes "
        f"{'; '.join(told)}. The arrivals bound tokens/s, so its time per token says more.{fixed}"
    )


def _over(interval: RatioInterval | None) -> str:
    if interval is None:
        return NOT_MEASURED
    return with_bounds(interval.ratio, interval.low, interval.high, 2)


def worth_blocks(
    analyses: Sequence[Analysis], served: Sequence[Mapping[str, Any]] = ()
) -> list[Block]:
    """Table and curve, acceptance, the line for vLLM, and what the numbers are of.

    `served`: rows of an open loop (`run.serving`)."""
    worth, header = measured_worth(analyses), analyses[0].run.header
    blocks: list[Block] = [rates_table(worth), *_curve(worth), Paragraph(HOW)]
    if on_cpu(header):
        blocks.append(ON_CPU)
    blocks += [
        _acceptance(analyses),
        Paragraph(_tokens_note(worth, analyses)),
        *vllm_line(worth, header.pair or PairFacts()),
        *served_note(served),
    ]
    parts = _parts_of(analyses)
    return [*blocks, *_times(parts), *_notes(worth, header, parts)]


def rates_table(worth: Worth) -> Table:
    """Tokens/s over k = 0 with verdicts, and what they are made of, by batch size and count."""
    rows = [
        [worth.sizes(r.requests), str(r.drafts), r.verdict,
         NOT_MEASURED if r.ratio is None else with_bounds(r.ratio, r.low, r.high, 2),
         decimal(r.tokens, 2), decimal(r.time_ratio, 2), str(r.groups)]
        for r in worth.rates
    ]  # fmt: skip
    heads = ["Requests", "k", "Verdict", "Tokens/s over k = 0", "Tokens", "Time", "Groups"]
    caption = (
        "Draft counts by batch size. Tokens: of a request in a window. Time: of a window over that "
        "at k = 0"
    )
    return table(heads, rows, numbers_from=3, caption=caption)


def _curve(worth: Worth) -> Iterator[Figure]:
    """Tokens/s over k = 0 by draft count, a line for each batch size."""
    lines = [
        (size, [rate for rate in own if rate.ratio is not None])
        for size, own in groupby(worth.rates, key=lambda rate: rate.requests)
    ]
    lines = [(size, own) for size, own in lines if own]
    if not lines:
        return
    tints = ("text", "faster", "slower", "ambiguous", "same", "soft")

    def draw(canvas: "Canvas") -> None:
        axes = canvas.subplots()
        axes.axhline(1, color=colour("soft"), lw=1.5, ls=":")
        for place, (size, own) in enumerate(lines):
            aside = 0.05 * (place - (len(lines) - 1) / 2)
            ratios = [rate.ratio or 1.0 for rate in own]
            reach = [[r - (x.low or r) for r, x in zip(ratios, own, strict=True)],
                     [(x.high or r) - r for r, x in zip(ratios, own, strict=True)]]  # fmt: skip
            axes.errorbar(
                [0, *(rate.drafts + aside for rate in own)], [1, *ratios],
                yerr=[[0, *reach[0]], [0, *reach[1]]], label=plural(size, "request"),
                color=colour(tints[place % len(tints)]), marker="osD^v<"[place % 6], lw=1.5,
                capsize=3,
            )  # fmt: skip
        axes.set_xticks(sorted({0, *(rate.drafts for rate in worth.rates)}))
        axes.set_xlabel("drafts per request and window (k)")
        axes.set_ylabel("tokens/s / that of k = 0")
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)

    words = "; ".join(
        f"{plural(r.requests, 'request')}, k = {r.drafts}: {r.ratio:.2f}"
        for _, own in lines
        for r in own
    )
    yield Figure(
        name="worth",
        caption="Tokens/s over k = 0 by draft count, with the table's intervals.",
        alternative=f"Tokens/s over k = 0. {words}.",
        draw=draw,
        height=320,
    )


@dataclass(frozen=True)
class _Parts:
    """Median times of a window, in ms: on a GPU those of its device. There the host runs a step
    ahead, and its time from step to step is that of another window."""

    requests: int
    k: int
    whole: float
    target: float | None
    """The target's forward and sampling; None if they were not timed apart."""


def _parts_of(analyses: Sequence[Analysis]) -> list[_Parts]:
    """By batch size and draft count, from windows that draft as many as they verify."""
    found: dict[tuple[int, int], list[WindowRecord]] = {}
    for each in analyses:
        size = batch_size(each.run)
        for window in each.run.windows:
            inside = window.group is not None and window.position != (window.run_length or 0) - 1
            if inside and window.num_reqs == size and _whole_ms(window):
                found.setdefault((size, window.cell.drafts or 0), []).append(window)
    parts = []
    for (size, k), own in sorted(found.items()):
        apart = [w.forward_ms + (w.sample_ms or 0.0) for w in own if w.forward_ms is not None]
        whole = median(map(_whole_ms, own))
        parts.append(_Parts(size, k, whole, median(apart) if apart else None))
    return parts


def _whole_ms(window: WindowRecord) -> float:
    return window.device_ms or window.wall_ms or 0.0


def _times(parts: Sequence[_Parts]) -> Iterator[Table]:
    """The target's time and the rest, if they were timed apart."""
    rows = [
        [
            str(p.requests),
            str(p.k),
            decimal(p.whole),
            decimal(p.target),
            decimal(p.whole - p.target),
        ]
        for p in parts
        if p.target is not None
    ]
    if rows:
        heads = ["Requests", "k", "Window ms", "Target ms", "Rest ms"]
        caption = "Median times. Target: its forward and sampling. Rest: drafter and host"
        yield table(heads, rows, caption=caption)


def _acceptance(analyses: Sequence[Analysis]) -> Table:
    """Windows of a request in which draft j was accepted, by draft count, in whole batches."""
    whole: dict[int, list[WindowRecord]] = {}
    for each in analyses:
        windows = windows_by_batch(each.run)
        for batch in each.run.batches:
            k = batch.cell.drafts
            if k and batch.phase in (Phase.GATE, Phase.TIMED):
                whole.setdefault(k, []).extend(windows[batch_key(batch)])
    most = max(whole, default=0)
    rows = [[str(k), *_positions(whole[k], most)] for k in sorted(whole)]
    named = named_rates(analyses[0].run)
    if named is not None:
        rows.append(["named", *(percent(rate) for rate in named[:most])])
    heads = ["k", *(f"draft {j + 1}" for j in range(most))]
    return table(heads, rows, caption="Acceptance by position: share of a request's windows")


def _positions(windows: Sequence[WindowRecord], most: int) -> list[str]:
    pairs = zip(*by_position(windows), strict=True)
    shares = [percent(a / d if d else None) for d, a in pairs]
    return shares + [NOT_MEASURED] * (most - len(shares))


def _tokens_note(worth: Worth, analyses: Sequence[Analysis]) -> str:
    if named_rates(analyses[0].run) is not None:
        return "Tokens a window are those of the named rates."
    pairs = [same_places(each.run) for each in analyses]
    equal, compared = sum(e for e, _ in pairs), sum(n for _, n in pairs)
    note = f"Tokens a window rest on {plural(worth.texts, 'different request')} of all batch sizes."
    if compared:
        note += (
            f" Does switching harm the drafter? From the same token of the same text, {equal} of "
            f"{plural(compared, 'window')} of other batches, interleaved ones among them, accepted "
            "what a window of the largest k did."
        )
    return note


def speculative_config(worth: Worth, pair: PairFacts) -> dict[str, Any] | None:
    """vLLM's speculative_config by what is shown; None for no speculation."""
    schedule = worth.schedule
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
        config["num_speculative_tokens_per_batch_size"] = schedule
    return config


def worth_result(
    analyses: Sequence[Analysis], served: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The same as JSON for scripts."""
    worth, pair = measured_worth(analyses), analyses[0].run.header.pair or PairFacts()
    return {
        "rates": [vars(rate) for rate in worth.rates],
        "best": {str(size): k for size, k in sorted(worth.best.items())},
        "different_requests": worth.texts,
        "speculative_config": speculative_config(worth, pair),
        "served": [asdict(each) for each in served_ratios(served)],
    }


def vllm_line(worth: Worth, pair: PairFacts) -> Iterator[Block]:
    """The flag to paste, and what it rests on; nothing if nothing is known."""
    config = speculative_config(worth, pair)
    if all(rate.ratio is None for rate in worth.rates):
        return
    if config is None:
        yield Paragraph("For vLLM: leave --speculative-config out.")
        return
    largest = max(worth.best)
    yield Paragraph(
        "For vLLM, only from differences that the intervals show, elsewhere the smaller k. Above "
        f"{plural(largest, 'request')} nothing was measured, and vLLM goes on with the last k:"
    )
    yield Code(f"--speculative-config '{json.dumps(config)}'")


def _notes(worth: Worth, header: RunHeader, parts: Sequence[_Parts]) -> Iterator[Block]:
    pair = header.pair or PairFacts()
    yield about_zero(pair, _drafter_share(parts))
    yield from noise_note(worth)


def about_zero(pair: PairFacts, share: str = "") -> Paragraph:
    """What k = 0 is. `share`: how much of a step that pass may take, if it was measured."""
    return Paragraph(
        "k = 0 is vLLM's own with a drafter loaded: the drafter still runs one pass in each step "
        f"to keep its cache filled{share}. A server without speculation saves that too, so the "
        "ratios above are over a k = 0 that is slower than plain decoding by up to that pass "
        f"(method {pair.method})."
    )


def noise_note(worth: Worth) -> Iterator[Paragraph]:
    """How far k = 0 was from itself, if that was measured."""
    if worth.noise:
        ratios = [
            f"{with_bounds(*bounds, digits=2)} at {_sizes(worth, [size])}"
            for size, bounds in sorted(worth.noise.items())
        ]
        yield Paragraph(f"Noise: k = 0 over itself took {joined(ratios)} times as long.")


def _drafter_shares(parts: Sequence[_Parts]) -> dict[int, float]:
    """What of a window at k = 0 is neither the target's forward nor sampling, by batch size."""
    plain = (part for part in parts if not part.k and part.target)
    return {part.requests: 1 - (part.target or 0.0) / part.whole for part in plain}


def _drafter_share(parts: Sequence[_Parts]) -> str:
    most = max(_drafter_shares(parts).values(), default=None)
    return "" if most is None else f" (with the host's work at most {percent(most, 0)} of it)"
