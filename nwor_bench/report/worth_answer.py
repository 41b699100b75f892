"""Draft counts: the sentence that answers, and the line for vLLM."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nwor_bench.analysis.draft_rates import Rate, Worth, best_rate
from nwor_bench.analysis.draft_tokens import named_rates
from nwor_bench.analysis.measured_worth import MeasuredWorth
from nwor_bench.analysis.worth import WindowTime, batch_size
from nwor_bench.errors import ExitCode
from nwor_bench.instruments.draft_counts import SAFE_GRAPHS, capture_size
from nwor_bench.records.header import PairFacts
from nwor_bench.records.types import Verdict
from nwor_bench.report.answer import Answer
from nwor_bench.report.document import Block, Code, Paragraph
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
        schedule = [[1, max(worth.best), worth.best_fixed or 0]]
    return speculative_config(schedule, pair)


def _has_one_count(worth: Worth) -> bool:
    """True if batch sizes ask for several counts, and no engine had several."""
    return len(worth.schedule) > 1 and worth.by_engines


def line_blocks(
    worth: Worth, pair: PairFacts, *, staged: bool = False, captured: int | None = None
) -> Iterator[Block]:
    """The line, and with `staged` that of a server that stages if it is another.

    `captured`: tokens of the largest window that had a graph as it was measured.
    """
    config = line_config(worth, pair)
    if all(rate.ratio is None for rate in worth.rates):
        return  # nothing is known
    if _has_one_count(worth):
        yield Paragraph(
            "Every engine had one draft count. So the line has one for all batch sizes: a larger k "
            "only if its gain, as geometric mean over the sizes of values and bounds, is sure."
        )
    if config is None:
        yield Paragraph("For vLLM: leave --speculative-config out.")
    else:
        largest = plural(max(worth.best), "request")
        yield Paragraph(
            "For vLLM, only from differences beyond interval and noise, elsewhere the smaller k. "
            f"Above {largest} nothing was measured, and vLLM goes on with the last k:"
        )
        yield _code(config)
        yield from _graphs_note(config, max(worth.best), captured or 0)
    if staged and worth.best_staged:
        yield from _staged_line(worth, pair, config)


def _graphs_note(config: Mapping[str, Any], largest: int, captured: int) -> Iterator[Paragraph]:
    """What a server needs to have the graphs that were measured, and to be safe with them."""
    schedule = config.get("num_speculative_tokens_per_batch_size")
    single = [[1, largest, config["num_speculative_tokens"]]]
    tokens = max(size * (drafts + 1) for _, size, drafts in schedule or single)
    graphs: dict[str, Any] = {}
    why: list[str] = []
    if schedule:
        graphs["cudagraph_mode"] = SAFE_GRAPHS
        why.append(
            "under changing draft counts vLLM 0.32.0 died with its default graphs, also without "
            "nwor-bench (docs/worth.md)"
        )
    if CAPTURED < tokens <= captured:
        graphs["max_cudagraph_capture_size"] = capture_size(tokens)
        why.append(
            f"by default vLLM captures no window above {CAPTURED} tokens, and those measured were"
        )
    if graphs:
        asked = f"--compilation-config '{json.dumps(graphs)}'"
        yield Paragraph(f"On a GPU serve it with {asked}: {'; '.join(why)}.")


def _staged_line(worth: Worth, pair: PairFacts, stock: dict[str, Any] | None) -> Iterator[Block]:
    """The line by the times of staged windows."""
    config = speculative_config(worth.staged_schedule, pair)
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
    """Does speculation pay, up to how many requests, and with how many drafts?"""
    counts = [cell for analysis in measured.analyses for cell in analysis.cells if cell.cell.drafts]
    if counts and all(cell.verdict == Verdict.INEFFECTIVE for cell in counts):
        text = f"At no draft count was a draft verified: {counts[0].reason}."
        return Answer(str(Verdict.INEFFECTIVE), text, exit_code=ExitCode.INCONCLUSIVE)
    broken = [
        f"{cell.label} at {plural(batch_size(analysis.run), 'request')}: {cell.reason}"
        for analysis in measured.analyses
        for cell in analysis.cells
        if cell.verdict == Verdict.INVALID
    ]
    worth, rates = measured.worth, named_rates(measured.analyses[0].run)
    headline = worth_sentence(worth)
    if broken:
        failed = "; ".join(broken)
        if all(rate.ratio is None for rate in worth.rates):
            text = "Whether speculation pays is not known, because draft counts failed their checks"
            return Answer(str(Verdict.INVALID), f"{text}: {failed}.")
        text = f"Draft counts failed their checks and are left out: {failed}. {headline.sentence}"
        headline = Answer(str(Verdict.INVALID), text)
    said = [headline.sentence, *_plain_decoding(worth, drafter_shares(measured.times))]
    said += _adaptive(worth)
    if rates is not None:
        shares = joined([percent(rate, 0) for rate in rates])
        drafts = f"drafts 1 to {len(rates)}"
        said.append(f"Acceptance is synthetic: {shares} of windows accept {drafts}.")
    return Answer(headline.badge, " ".join(said))


def _plain_decoding(worth: Worth, shares: Mapping[int, float]) -> Iterator[str]:
    """Batch sizes at which the gain over k = 0 may be no more than what k = 0 drafts in vain."""
    small = [
        rate.requests
        for rate in worth.rates
        if rate.drafts == worth.best.get(rate.requests)
        and rate.requests in shares
        and (rate.ratio.low if rate.ratio else 0.0) * (1 - shares[rate.requests]) <= 1
    ]
    if small:
        most = percent(max(shares[size] for size in small), 0)
        yield (
            f"At {sizes_of(worth, small)} a server without a drafter may be as fast: at k = 0 the "
            f"drafter still runs once a step, with the host's work up to {most} of its time."
        )


def _adaptive(worth: Worth) -> Iterator[str]:
    """What adaptive verification gives, if it was measured."""
    told = [
        f"{interval(rate.ratio, 2)} times at {sizes_of(worth, [rate.requests])}"
        for rate in worth.rates
        if rate.adaptive and rate.ratio is not None
    ]
    if told:
        yield f"Adaptive verification gives, over the tokens/s of k = 0, {joined(told)}."


def worth_sentence(worth: Worth) -> Answer:
    """Up to how many requests speculation pays, and what it gives there."""
    fixed = [rate for rate in worth.rates if not rate.adaptive]
    known = [rate for rate in fixed if rate.ratio is not None]
    best = best_rate(fixed)
    if best is None:
        return Answer(
            str(Verdict.AMBIGUOUS),
            "This does not show whether speculation pays: there are too few windows or requests "
            "for an interval. Measure longer.",
        )
    paying = [r for r in known if worth.best[r.requests] == r.drafts]
    slower = [rate for rate in known if rate.verdict == Verdict.SLOWER]
    if paying:
        ends = [paying[0]] if len(paying) == 1 else [paying[0], paying[-1]]
        text = f"Speculate {_where(worth)}: {_times(ends[0])} the tokens/s of k = 0"
        text += f" {_at(worth, ends[0])}"
        text += "".join(f", {_times(rate)} {_at(worth, rate)}" for rate in ends[1:])
        rest = [size for size, k in sorted(worth.best.items()) if not k]
        if rest:
            text += f"; at {sizes_of(worth, rest)} no draft count is shown to pay"
        if worth.unmeasured:
            text += f"; at {sizes_of(worth, worth.unmeasured)} nothing was measured"
        return Answer(str(Verdict.FASTER), f"{text}.")
    rate, ratio = best
    bounds = interval(ratio, 2)
    if len(slower) == len(fixed):
        text = f"Do not speculate here: at best it gives {bounds} times the tokens/s of k = 0"
        return Answer(str(Verdict.SLOWER), f"{text}, {_at(worth, rate)}.")
    text = f"No draft count is shown to pay here. The best has {bounds} times the tokens/s of k = 0"
    return Answer(str(Verdict.AMBIGUOUS), f"{text}, {_at(worth, rate)}.")


def _where(worth: Worth) -> str:
    sizes = sorted({rate.requests for rate in worth.rates})
    pays = [size for size in sizes if worth.best.get(size)]
    if pays == sizes[: len(pays)]:
        return f"up to {plural(pays[-1], 'request')}"
    return f"at {sizes_of(worth, pays)}"


def sizes_of(worth: Worth, sizes: Sequence[int]) -> str:
    """`1 request`, `1 and 8 requests`, `1 and 5-8 requests`."""
    named = joined([worth.sizes(size) for size in sizes])
    return f"{named} request{'' if list(sizes) == [1] else 's'}"


def _times(rate: Rate) -> str:
    assert rate.ratio is not None  # a count that pays has one
    return f"{rate.ratio.value:.2f} times"


def _at(worth: Worth, rate: Rate) -> str:
    return f"at {sizes_of(worth, [rate.requests])} with k = {rate.drafts}"


def drafter_shares(times: Sequence[WindowTime]) -> dict[int, float]:
    """What of a window at k = 0 is neither the target's forward nor sampling, by batch size."""
    plain = (time for time in times if not time.drafts and time.target_ms)
    return {time.requests: 1 - (time.target_ms or 0.0) / time.window_ms for time in plain}
