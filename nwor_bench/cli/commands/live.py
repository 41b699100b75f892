"""`nwor-bench live URL`: does NWOR, or speculation, pay on the traffic of a running server?"""

from contextlib import nullcontext
from functools import partial
from typing import Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet, tell_json
from nwor_bench.errors import ConfigError


def live(
    url: Annotated[str, typer.Argument(help="The server's address: http://HOST:PORT.")],
    ci_width: Annotated[
        str, typer.Option(help="Stop when the ratio is known to +- this much.")
    ] = "0.5%",
    time_budget: Annotated[
        str, typer.Option(help="Stop after this time at the latest.")
    ] = "10m",
    num_reqs: Annotated[
        str, typer.Option(help="Batch size whose ratio counts, such as 8 or 5-8; all: any.")
    ] = "all",
    strict: Annotated[
        bool, typer.Option("--strict", help="End with 5 if the answer is inconclusive.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
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
    from nwor_bench.workload.stopping import parse_fraction, parse_seconds

    wanted = Wanted(
        num_reqs=_class_of(num_reqs),
        ci_width=parse_fraction("--ci-width", ci_width),
        time_budget_s=parse_seconds("--time-budget", time_budget),
    )
    address = metrics_address(url)
    from rich.console import Console
    from rich.text import Text

    from nwor_bench.report.terminal import print_document

    console = Console()
    with nullcontext() if quiet or as_json else console.status("") as status:

        def show(reading: Reading, waited_s: float) -> None:
            if status is not None:  # prints nothing without a terminal
                status.update(Text(text.progress_line(reading, wanted, waited_s)))

        seen = watch(partial(read, address), wanted, show)
    code = text.exit_code(seen, wanted, strict=strict)
    if as_json:
        tell_json(text.result(seen, wanted, url, code))
    else:
        print_document(console, text.document(seen, wanted, quiet=quiet))
    raise typer.Exit(code)


def _class_of(given: str) -> str:
    """`8` and `5-8` are `5-8`."""
    from nwor_bench.records.window_order import ALL, size_class

    low, dash, high = given.partition("-")
    if given == ALL:
        return ALL
    if all(part.isdecimal() and int(part) for part in ((low, high) if dash else (low,))):
        found = size_class(int(high or low))
        if not dash or found == given:
            return found
    raise ConfigError.for_field(
        "--num-reqs", given, "write all, a batch size, or a class: 1, 2, 3-4, 5-8, 9-16, ..."
    )
