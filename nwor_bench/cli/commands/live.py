"""`nwor-bench live URL`: does NWOR, or speculation, pay on the traffic of a running server?"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from nwor_bench.cli.command import tell_json
from nwor_bench.cli.flags import AsJson, Quiet, with_flags
from nwor_bench.errors import ConfigError
from nwor_bench.records.window_order import ALL, size_class
from nwor_bench.workload.options import Option, fraction, quantity
from nwor_bench.workload.stopping import parse_seconds

_width = quantity(fraction, lambda value: 0 <= value < 1, "write for example 0.5%, or 0")


def _class_of(flag: str, given: str) -> str:
    """`8` and `5-8` are `5-8`."""
    low, dash, high = given.partition("-")
    if given == ALL:
        return ALL
    if all(part.isdecimal() and int(part) for part in ((low, high) if dash else (low,))):
        size = size_class(int(high or low))
        if not dash or size == given:
            return size
    wanted = "write all, a batch size, or a class: 1, 2, 3-4, 5-8, 9-16, ..."
    raise ConfigError.for_field(flag, given, wanted)


@dataclass(frozen=True)
class LiveOptions:
    """When to end, and what is printed."""

    # fmt: off
    ci_width: Annotated[float, Option(
        "Stop when the ratio is known to +- this much; 0: when the time is up.", shown="0.5%",
        read=_width,
    )] = 0.005
    time_budget_s: Annotated[float, Option(
        "Stop after this time at the latest.", name="time_budget", shown="10m", read=parse_seconds,
    )] = 600.0
    num_reqs: Annotated[str, Option(
        "Batch size whose ratio counts, such as 8 or 5-8; all: any.", read=_class_of,
    )] = ALL
    strict: Annotated[bool, Option("End with 5 if the answer is inconclusive.")] = False
    # fmt: on
    quiet: Quiet = False
    as_json: AsJson = False


@with_flags()
def live(
    url: Annotated[str, typer.Argument(help="The server's address: HOST:PORT, or with https://.")],
    options: LiveOptions,
) -> None:
    """Watch a server in which modes or draft counts are interleaved: what pays?

    The server runs with VLLM_NWOR_MODE=interleave (off against stage) or
    VLLM_NWOR_DRAFTS=interleave (0 to K drafts); this only reads its /metrics.

    Exit codes: 0 done, 1 server unreachable, 2 bad input or no such metrics,
    3 a correctness guard stopped staging, 5 inconclusive with --strict,
    130 interrupted.
    """
    from nwor_bench.live import text
    from nwor_bench.live.reading import Reading, metrics_address, read
    from nwor_bench.live.watch import Wanted, watch

    wanted = Wanted(options.num_reqs, options.ci_width, options.time_budget_s)
    address = metrics_address(url)
    from rich.console import Console
    from rich.text import Text

    from nwor_bench.report.terminal import print_document

    console = Console()
    with nullcontext() if options.quiet or options.as_json else console.status("") as status:

        def show(reading: Reading, waited_s: float) -> None:
            if status is not None:  # prints nothing without a terminal
                status.update(Text(text.progress_line(reading, wanted, waited_s)))

        seen = watch(partial(read, address), wanted, show)
    code = text.exit_code(seen, wanted, strict=options.strict)
    if options.as_json:
        tell_json(text.result(seen, wanted, url, code))
    else:
        print_document(console, text.document(seen, wanted, quiet=options.quiet))
    raise typer.Exit(code)
