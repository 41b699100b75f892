"""`nwor-bench live URL`: does NWOR pay on the traffic of a running server?"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from nwor_bench.cli.command import AsJson, Quiet, tell_json
from nwor_bench.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from nwor_bench.cli.live_server import Reading, Seen, Wanted

SAY_EVERY_S = 10.0
"""Time between two lines if there is no terminal."""


def live(
    url: Annotated[str, typer.Argument(help="The server's address: http://HOST:PORT.")],
    ci_width: Annotated[
        str, typer.Option(help="Stop when the ratio is known to +- this much.")
    ] = "0.5%",
    time_budget: Annotated[
        str, typer.Option(help="Stop after this time in any case.")
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
    """Watch a server in which off and stage are interleaved: does NWOR pay?

    The server runs with VLLM_NWOR_MODE=interleave; this only reads its /metrics.

    Exit codes: 0 done, 1 server unreachable or gone, 2 bad input or no such metrics,
    3 a correctness guard stopped staging, 5 inconclusive with --strict,
    130 interrupted.
    """
    from functools import partial

    from nwor_bench.cli.live_server import Wanted, metrics_address, read, watch
    from nwor_bench.workload.stopping import parse_fraction, parse_seconds

    wanted = Wanted(
        num_reqs=_class_of(num_reqs),
        ci_width=parse_fraction("--ci-width", ci_width),
        time_budget_s=parse_seconds("--time-budget", time_budget),
    )
    address = metrics_address(url)
    from rich.console import Console

    console = Console()
    with _display(console, wanted, silent=quiet or as_json) as show:
        seen = watch(partial(read, address), wanted, show)
    code = _exit_code(seen, wanted, strict)
    _tell(console, seen, wanted, url, code, quiet=quiet, as_json=as_json)
    raise typer.Exit(code)


def _class_of(text: str) -> str:
    """`8` and `5-8` are `5-8`."""
    from nwor_bench.records.window_order import ALL, size_class

    low, dash, high = text.partition("-")
    if text == ALL:
        return ALL
    if all(part.isdecimal() and int(part) for part in ((low, high) if dash else (low,))):
        found = size_class(int(high or low))
        if not dash or found == text:
            return found
    raise ConfigError.for_field(
        "--num-reqs", text, "write all, a batch size, or a class: 1, 2, 3-4, 5-8, 9-16, ..."
    )


@contextmanager
def _display(
    console: "Console", wanted: "Wanted", silent: bool
) -> "Iterator[Callable[[Reading, float], None]]":
    """A line that updates in place on a terminal, lines elsewhere, or nothing."""
    if silent:
        yield lambda reading, waited_s: None
        return
    from nwor_bench.cli.live_text import progress_line

    if not console.is_terminal:
        last = -SAY_EVERY_S

        def say(reading: "Reading", waited_s: float) -> None:
            nonlocal last
            if waited_s - last >= SAY_EVERY_S:
                last = waited_s
                typer.echo(progress_line(reading, wanted, waited_s))

        yield say
        return
    from rich.text import Text

    with console.status("") as status:
        yield lambda reading, waited_s: status.update(
            Text(progress_line(reading, wanted, waited_s))
        )


def _exit_code(seen: "Seen", wanted: "Wanted", strict: bool) -> ExitCode:
    from nwor_bench.cli.live_server import Ended
    from nwor_bench.cli.live_text import is_conclusive

    codes = {
        Ended.STOPPED: ExitCode.CORRECTNESS_BROKEN,
        Ended.GONE: ExitCode.FAILED,
        Ended.INTERRUPTED: ExitCode.INTERRUPTED,
    }
    if seen.ended in codes:
        return codes[seen.ended]
    inconclusive = strict and not is_conclusive(seen, wanted)
    return ExitCode.INCONCLUSIVE if inconclusive else ExitCode.OK


def _tell(
    console: "Console",
    seen: "Seen",
    wanted: "Wanted",
    url: str,
    code: ExitCode,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    """The document, or its answer only, or JSON."""
    from nwor_bench.cli import live_text as text

    if as_json:
        tell_json(text.result(seen, wanted, url, code))
        return
    from nwor_bench.report.terminal import print_document

    print_document(console, text.document(seen, wanted, quiet=quiet))
