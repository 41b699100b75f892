"""A sign of life while a step takes long: imports, an engine's start, a batch on a slow CPU."""

import time
from collections.abc import Callable
from threading import Event, Thread

QUIET_S = 2.0
"""Longest time without a line."""


class Heartbeat:
    """Prints what is being done if nothing was printed for a while. A context manager.

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
                self._echo(f"  {self._doing}: {now - self._began:.0f} s")
                self._printed = now
