"""An implementation of a kernel's work: its calls, and a check of its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nwor_bench.microbench.rows import Status, Timed

Call = Callable[[], object]


@dataclass(frozen=True)
class Implementation:
    """One implementation of a kernel's work, in one group.

    Attributes:
        name: `nwor` or a peer's.
        launches: kernels that a call launches.
        bytes_moved: bytes that a call must read and write; None for the empty kernel.
        calls: one per set of buffers; a round over all sets finds none of its data in L2.
        check: makes one call on poisoned outputs; returns the fault, or an empty string.
    """

    name: str
    launches: int
    bytes_moved: int | None
    calls: Sequence[Call]
    check: Callable[[], str]

    @property
    def timed(self) -> Timed:
        """The facts that its rows show."""
        return Timed(self.name, self.launches, self.bytes_moved)


class RefusedError(Exception):
    """The implementation cannot run here; its rows show the reason instead of a time."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


def not_installed(reason: str) -> RefusedError:
    """Error for a library that is not installed."""
    return RefusedError(Status.NOT_INSTALLED, reason)


def refused(reason: str) -> RefusedError:
    """Error for a case that the implementation does not support."""
    return RefusedError(Status.REFUSED, reason)


@dataclass(frozen=True)
class Refusal:
    """A peer that is listed but not timed."""

    name: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Implementations:
    """All implementations of one group: those that can run, and those that cannot."""

    runnable: tuple[Implementation, ...]
    refused: tuple[Refusal, ...]


def with_peers(
    ours: Implementation, names: Sequence[str], make: Callable[[str], Implementation]
) -> Implementations:
    """Our implementation and the peers `names`; a peer that `make` cannot make is refused."""
    runnable, refusals = [ours], []
    for name in names:
        try:
            runnable.append(make(name))
        except RefusedError as refusal:
            refusals.append(Refusal(name, refusal.status, refusal.reason))
        except Exception as error:  # a foreign library may raise anything
            refusals.append(Refusal(name, Status.REFUSED, describe(error)))
    return Implementations(tuple(runnable), tuple(refusals))


def describe(error: Exception) -> str:
    """An error as a reason: its type and its first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
