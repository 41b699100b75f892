"""Make Ctrl-C and SIGTERM end a run, even if other code swallows the exception.

Python raises KeyboardInterrupt in whatever code is running. In a finaliser or a callback it is
printed and ignored, and a library may catch it; the run would continue for hours.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Remembers that a signal has asked this process to stop."""

    def __init__(self) -> None:
        self.seen = False

    def check(self) -> None:
        """Raise KeyboardInterrupt (again) if a signal arrived and has not ended the run."""
        if self.seen:
            raise KeyboardInterrupt


@contextmanager
def heed_interrupts() -> Iterator[Interrupts]:
    """SIGINT and SIGTERM raise KeyboardInterrupt and are remembered; in the main thread alone.

    SIGTERM too, so that results survive when a CI runner stops the job. A SIGINT that the process
    ignored from its start, like a shell's background job, stays ignored.
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
