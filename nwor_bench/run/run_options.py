"""Options that do not change the measurement: where a run goes, what is shown, signs of life."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

from nwor_bench.errors import ConfigError
from nwor_bench.instruments.cards import Card, card_named
from nwor_bench.workload.options import Option, Panel

QUIET_S = 15.0
"""Longest time without a line."""


class Heartbeat:
    """Prints what is being done if nothing was printed for a while: imports, an engine's start, a
    batch on a slow CPU. A context manager.

    Args:
        echo: prints a line.
        doing: what is being done first.
        quiet_s: longest time without a line.
    """

    def __init__(self, echo: Callable[[str], None], doing: str, quiet_s: float = QUIET_S):
        self._echo = echo
        self._quiet_s = quiet_s
        self._ended = Event()
        self._doing = doing
        self.shown: Callable[[], str] | None = None
        """What a line says, if not what is done and for how long."""
        self._began = self._printed = time.monotonic()
        self._thread = Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Print nothing more."""
        self._ended.set()

    def note(self, doing: str | None = None) -> None:
        """A line was printed; `doing` is what is done from now on, if it is something else."""
        self._printed = time.monotonic()
        if doing is not None:
            self._doing, self._began = doing, self._printed

    def _run(self) -> None:
        while not self._ended.wait(self._quiet_s / 10):
            now = time.monotonic()
            if now - self._printed >= self._quiet_s:
                waited = f"{self._doing}: {now - self._began:.0f} s"
                self._echo(f"  {waited if self.shown is None else self.shown()}")
                self._printed = now


def _new_folder(flag: str, text: str) -> Path:
    if text == "":
        raise ConfigError.for_field(flag, text, "name a new folder")
    return Path(text)


@dataclass(frozen=True)
class RunOptions:
    """Where a run or a sweep goes, and what is printed."""

    # fmt: off
    output: Annotated[Path | None, Option(
        "Run folder (default: runs/TIME-SCENARIO-PAIR).", Panel.FILES, written=str,
        read=_new_folder,
    )] = None
    resume: Annotated[Path | None, Option(
        "Continue the run (or sweep) in this folder.", Panel.FILES, written=str,
    )] = None
    file: Annotated[Path | None, Option(
        "A sweep file (sweeps/*.toml): many runs, as few engines as possible.", Panel.FILES,
        written=str,
    )] = None
    """A sweep file, or the name of a shipped one."""
    continue_on_error: Annotated[bool, Option(
        "With --file: continue with the next run if one fails.", Panel.FILES,
    )] = False
    ray: Annotated[bool, Option(
        "With --file: on a Ray cluster (RAY_ADDRESS, else this machine), one engine per GPU.",
        Panel.FILES,
    )] = False
    dry_run: Annotated[bool, Option("Show what would run, and stop.")] = False
    device: Annotated[Card | None, Option(
        "With --dry-run: plan for this GPU, such as h100 or l4, not for this machine.",
        written=str, read=card_named,
    )] = None
    quiet: Annotated[bool, Option(
        "Print only the answer and the folder.", aliases=("-q",),
    )] = False
    as_json: Annotated[bool, Option(
        "Print only the result, as JSON (docs/json.md).", name="json",
    )] = False
    verbose: Annotated[bool, Option(
        "Show all details, and vLLM's log.", aliases=("-v",),
    )] = False
    """Print every finding and leave vLLM's log on the terminal, not in a file of the folder."""
    # fmt: on
    heartbeat: Heartbeat | None = None
    """Shows that a long step goes on; None for none."""


DEFAULT_OPTIONS = RunOptions()
"""Options of a run of which nothing is asked but to be run."""
