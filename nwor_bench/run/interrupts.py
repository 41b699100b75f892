"""Ctrl-C and SIGTERM, which must end a run although other code may lose them on the way.

Python raises KeyboardInterrupt wherever it happens to be. In a finaliser or a callback it is
printed as ignored and gone, and a library may catch it for itself; the run would go on for hours.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether somebody has asked this process to stop."""

    def __init__(self) -> None:
        self.seen = False

    def check(self) -> None:
        """Raise KeyboardInterrupt (again) if one was asked for and has not ended the run."""
        if self.seen:
            raise KeyboardInterrupt


@contextmanager
def heed_interrupts() -> Iterator[Interrupts]:
    """SIGINT and SIGTERM raise KeyboardInterrupt and are remembered; in the main thread alone.

    SIGTERM because a CI runner's stop is to keep what was measured too. A SIGINT that the process
    was started to ignore, as a shell's background jobs are, stays ignored.
    """
    interrupts = Interrupts()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        interrupts.seen = True
        raise KeyboardInterrupt

    heeded = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        heeded.append(signal.SIGINT)
    previous = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield interrupts
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
