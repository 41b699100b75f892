"""`nwor-bench check`: the verdict, the batch sizes, known causes, and what to type next."""

import re
import shlex
from collections.abc import Iterator

from nwor_bench.analysis.check import Check, CheckVerdict, SizeCheck, causes
from nwor_bench.errors import ExitCode
from nwor_bench.records.header import RunHeader
from nwor_bench.report.answer import Answer
from nwor_bench.report.document import Block, Definitions, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, plural

_CODES = {
    CheckVerdict.WRONG: ExitCode.CORRECTNESS_BROKEN,
    CheckVerdict.NOT_CHECKED: ExitCode.INCONCLUSIVE,
}


def check_answer(check: Check) -> Answer:
    """The verdict and its first evidence, in a sentence."""
    own, tokens = check.worst, count(sum(size.tokens or 0 for size in check.sizes))
    if own.verdict in _CODES:
        text = f"at {plural(own.requests, 'request')}, {_first_wrong(own) or _why(own)}"
    elif own.verdict is CheckVerdict.TIES:
        widest = max(check.sizes, key=lambda size: size.largest_gap or 0.0)
        ties = sum(len(size.places) for size in check.sizes)
        apart = _apart(widest, widest.largest_gap)
        text = f"{ties} of {tokens} tokens differ, only at ties of plain decoding ({apart})"
    else:
        text = f"all {tokens} tokens are plain decoding's"
    if own.verdict not in _CODES and check.first_drafts == 0:
        text += ", but no draft was accepted"
    return Answer(own.verdict, f"{text}.", exit_code=_CODES.get(own.verdict, ExitCode.OK))


def _first_wrong(own: SizeCheck) -> str | None:
    """The first wrong token beside plain decoding's; None if there is none alone."""
    place = next((place for place in own.places if not place["is_tie"]), None)
    if place is None:
        return None
    return (
        f"request {place['request']}, output token {place['position']}: {place['token']}, plain "
        f"decoding gives {place['reference']} ({_apart(own, place['gap'])})"
    )


def _apart(own: SizeCheck, gap: float | None) -> str:
    """A gap beside the largest of a tie."""
    if gap is None or own.allowance is None:
        return "the token is not among plain decoding's likeliest"
    return f"{gap:.2g} nats apart, a tie is at most {own.allowance:.2g}"


def _why(own: SizeCheck) -> str:
    return " ".join((own.why or "nothing was compared").split()).rstrip(".")


def check_blocks(check: Check) -> list[Block]:
    """What was compared at each batch size, known causes, and what to type next."""
    heads = ["Requests", "Output", "Tokens compared", "Requests that differ", "Largest gap, nats",
             "Accepted by position, %"]  # fmt: skip
    rows, entries = [], [("Compared:", _compared(check.header))]
    for own in check.sizes:
        differing = len({place["request"] for place in own.places})
        differ = NOT_MEASURED if own.tokens is None else str(differing)
        rates = " ".join(f"{100 * rate:.0f}" for rate in own.acceptance) or NOT_MEASURED
        counts = [count(own.tokens), differ, decimal(own.largest_gap, 3), rates]
        rows.append([str(own.requests), own.verdict, *counts])
        if own.verdict is CheckVerdict.NOT_CHECKED and own is not check.worst:
            entries.append((f"Not checked at {plural(own.requests, 'request')}:", f"{_why(own)}."))
    entries += [("Known:", cause) for cause in causes(check)]
    entries += [("Next:", step) for step in _next(check)]
    return [table(heads, rows, numbers_from=2), Definitions(tuple(entries))]


def _compared(header: RunHeader) -> str:
    """Both engines in two sentences."""
    scenario, engine = header.scenario or {}, header.engine
    text = (
        f"k = {scenario.get('draft_tokens')} ({header.pair.method}) with an engine without "
        f"speculation, token by token, greedy, up to {scenario.get('max_new_tokens')} tokens a "
        f"request, {header.data_type}. Both are stock vLLM {engine.vllm or ''}; NWOR is off."
    )
    if engine.state_slots and not header.spec.engine_args.get("enable_prefix_caching"):
        text += " No prefix caching (--engine-args '{\"enable_prefix_caching\": true}' adds it)."
    return text


def _next(check: Check) -> Iterator[str]:
    """What to type next, by the verdict."""
    header, own = check.header, check.worst
    if own.verdict is CheckVerdict.NOT_CHECKED:
        yield "vLLM's own logs are engine.log and engine-1.log in the run's folder."
    elif own.verdict is CheckVerdict.WRONG:
        command = _command(header, "requests|num-prompts")
        yield f"report it to vLLM: {command} --requests {own.requests}"
        yield "every differing token: nwor-bench report FOLDER --json"
    else:
        if own.verdict is CheckVerdict.TIES and header.engine.state_slots is None:
            yield f"float32 has hardly any ties: {_command(header, 'dtype')} --dtype float32"
        given = {name: value for name, value in (header.choice or {}).items() if value is not None}
        models = " ".join(f"--{n.replace('_', '-')} {shlex.quote(v)}" for n, v in given.items())
        sizes = ",".join(str(each.requests) for each in check.sizes)
        yield f"how many drafts pay? nwor-bench worth {models} --requests {sizes}"


def _command(header: RunHeader, changed: str) -> str:
    """The command without its folder and what the next one changes, a pattern of flags."""
    flags = rf" --(output|{changed})[ =]('[^']*'|\S+)"
    return re.sub(flags, "", header.command or "nwor-bench check")
