"""What a stopwatch times: an implementation's calls, and how to see that they do the work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nwor_bench.microbench.rows import Status, Timed

Call = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """One implementation in one group.

    Attributes:
        name: `nwor` or a peer's.
        launches: kernels that a call launches.
        bytes_moved: bytes that a call must read and write; None for a kernel that does nothing.
        calls: one for each set of buffers; going round them finds nothing of theirs in L2.
        check: makes one call on poisoned outputs and says what is wrong, or nothing.
    """

    name: str
    launches: int
    bytes_moved: int | None
    calls: Sequence[Call]
    check: Callable[[], str]

    @property
    def timed(self) -> Timed:
        """Its part of a line."""
        return Timed(self.name, self.launches, self.bytes_moved)


class RefusedError(Exception):
    """An implementation that cannot run here; it is listed with the reason."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


def not_installed(reason: str) -> RefusedError:
    """A library that is not there."""
    return RefusedError(Status.NOT_INSTALLED, reason)


def refused(reason: str) -> RefusedError:
    """A case that an implementation does not do."""
    return RefusedError(Status.REFUSED, reason)


@dataclass(frozen=True)
class Refusal:
    """A peer that is listed and not timed."""

    name: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Contest:
    """The implementations of one group: those that can run, and those that cannot."""

    subjects: tuple[Subject, ...]
    refusals: tuple[Refusal, ...]


def contest(ours: Subject, names: Sequence[str], make: Callable[[str], Subject]) -> Contest:
    """Our subject and the peers of `names`; a peer that `make` cannot make is a refusal."""
    subjects, refusals = [ours], []
    for name in names:
        try:
            subjects.append(make(name))
        except RefusedError as refusal:
            refusals.append(Refusal(name, refusal.status, refusal.reason))
        except Exception as error:  # whatever a foreign library raises; it is listed
            refusals.append(Refusal(name, Status.REFUSED, told(error)))
    return Contest(tuple(subjects), tuple(refusals))


def told(error: Exception) -> str:
    """An error as a reason: its kind and its first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]
