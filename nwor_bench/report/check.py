"""`nwor-bench check`: the verdict, the batch sizes, known causes, and what to type next."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from nwor_bench.analysis.check import Check, CheckVerdict, SizeCheck, causes
from nwor_bench.errors import ExitCode
from nwor_bench.records.header import RunHeader
from nwor_bench.report.answer import Answer, on_cpu
from nwor_bench.report.document import Block, Definitions, table
from nwor_bench.report.text import NOT_MEASURED, count, decimal, plural

_CODES = {
    CheckVerdict.WRONG: ExitCode.CORRECTNESS_BROKEN,
    CheckVerdict.NOT_CHECKED: ExitCode.INCONCLUSIVE,
}


def check_answer(check: Check) -> Answer:
    """The verdict and its first evidence in a sentence, and what it rests on."""
    own, tokens = check.worst, count(sum(size.tokens or 0 for size in check.sizes))
    at, first = plural(own.requests, "request"), own.first_wrong
    if own.verdict is CheckVerdict.NOT_CHECKED:
        text = f"nothing was compared at {at}"
    elif first is not None:
        text = (
            f"output token {first['position']} of request {first['request']} is {first['token']}, "
            f"plain decoding gives {first['reference']} ({at})"
        )
    elif own.verdict is CheckVerdict.WRONG:
        text = f"more tokens differ at {at} than ties explain"
    elif own.verdict is CheckVerdict.TIES:
        ties = sum(len(size.places) for size in check.sizes)
        text = f"{ties} of {tokens} tokens differ, only at ties of plain decoding"
    else:
        text = f"all {tokens} tokens are plain decoding's"
    badge, code = str(own.verdict), _CODES.get(own.verdict, ExitCode.OK)
    if own.verdict not in _CODES and check.first_drafts == 0:
        badge += ", but no draft was accepted"
    return Answer(badge, f"{text}.", exit_code=code, facts=tuple(_facts(check)))


def _facts(check: Check) -> Iterator[tuple[str, str]]:
    """How far the tokens are apart, why a size was not checked, what was compared, and causes."""
    for own in check.sizes:
        place = own.first_wrong
        if place is None and own.verdict in _CODES:
            yield f"at {own.requests}", " ".join((own.why or "it did not run").split())
        elif place is not None and place["gap"] is None:
            yield "gap", "the token is not among plain decoding's likeliest"
        elif own.largest_gap is not None:
            gap = f"at most {own.largest_gap:.2g}" if place is None else f"{place['gap']:.2g}"
            yield "gap", f"{gap} nats apart; a tie is at most {own.allowance or 0:.2g}"
    yield "compared", _compared(check.header)
    yield from (("known", cause) for cause in causes(check))


def _compared(header: RunHeader) -> str:
    """The two engines and what they decode, in two sentences."""
    scenario, engine = header.scenario or {}, header.engine
    text = (
        f"{header.pair.name}: k = {scenario.get('draft_tokens')} ({header.pair.method}) with plain "
        f"decoding, greedily, up to {scenario.get('max_new_tokens')} tokens a request, "
        f"{header.data_type}; two engines of stock vLLM {engine.vllm or ''}, NWOR off"
    )
    if engine.state_slots and not header.spec.engine_args.get("enable_prefix_caching"):
        added = (
            "" if on_cpu(header) else " (--engine-args '{\"enable_prefix_caching\": true}' adds it)"
        )
        text += f"; no prefix caching{added}"
    return text


def check_screen(check: Check) -> list[Block]:
    """The answer, its facts, each batch size, and what to type next."""
    heads = ["Requests", "Output", "Tokens compared", "Requests that differ", "Largest gap, nats",
             "Accepted by position, %"]  # fmt: skip
    rows = []
    for own in check.sizes:
        differing = len({place["request"] for place in own.places})
        differ = NOT_MEASURED if own.tokens is None else str(differing)
        rates = " ".join(f"{100 * rate:.0f}" for rate in own.acceptance) or NOT_MEASURED
        counts = [count(own.tokens), differ, decimal(own.largest_gap, 3), rates]
        rows.append([str(own.requests), own.verdict, *counts])
    reply, steps = check_answer(check), [("next", step) for step in _next(check, check.worst)]
    sizes = table(heads, rows, numbers_from=2)
    colour = {CheckVerdict.WRONG: "invalid", CheckVerdict.NOT_CHECKED: "none"}
    head = replace(reply.headline, kind=colour.get(check.worst.verdict, "faster"))
    return [head, Definitions(reply.facts), sizes, Definitions(tuple(steps))]


def _next(check: Check, worst: SizeCheck) -> Iterator[str]:
    """What to type next, by the verdict."""
    header = check.header
    if worst.verdict is CheckVerdict.NOT_CHECKED:
        yield "vLLM's own logs are engine.log and engine-1.log in the run's folder"
    elif worst.verdict is CheckVerdict.WRONG:
        command = _command(header, "requests|num-prompts")
        yield f"report it to vLLM: {command} --requests {worst.requests}"
        yield "every differing token: nwor-bench report FOLDER --json"
    else:
        if worst.verdict is CheckVerdict.TIES and header.engine.state_slots is None:
            yield f"hardly any ties: {_command(header, 'dtype')} --dtype float32"
        given = {name: value for name, value in (header.choice or {}).items() if value is not None}
        flags = {name: name.removeprefix("target_").replace("_", "-") for name in given}
        models = " ".join(f"--{flags[name]} {shlex.quote(v)}" for name, v in given.items())
        sizes = ",".join(str(own.requests) for own in check.sizes)
        yield f"how many drafts pay: nwor-bench worth {models} --requests {sizes}"


def _command(header: RunHeader, changed: str) -> str:
    """The command without its folder and what the next one changes, a pattern of flags."""
    flags = rf" --(output|{changed})[ =]('[^']*'|\S+)"
    return re.sub(flags, "", header.command or "nwor-bench check")
