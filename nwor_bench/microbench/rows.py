"""Implementations of a kernel's work, what times them, and the rows that a run makes. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any, Protocol

from nwor_bench.analysis.statistics import paired_ratio
from nwor_bench.microbench.cases import OURS, Group, Spec
from nwor_bench.records.facts import Environment

FORMAT_VERSION = 3
"""Version of kernels.json and kernels.csv; increase it when a column changes its meaning."""


class Status(StrEnum):
    """Whether a row has a time, and if not, why."""

    OK = "OK"
    INVALID = "INVALID"
    """Its result was wrong, so it was not timed."""
    REFUSED = "REFUSED"
    """It is not installed, does not support this case, or raised an error."""


@dataclass(frozen=True)
class Row:
    """A row of the table; None if not measured."""

    kernel: str
    """The kernel whose work the row does."""
    implementation: str
    """`nwor`, or the peer's name."""
    status: Status
    """`OK`, `INVALID` (wrong result) or `REFUSED`."""
    cache_dtype: str
    """Data type of the cache."""
    requests: int
    """Requests per call."""
    drafts: int
    """Draft tokens per request."""
    acceptance: float | None
    """Accepted over draft tokens."""
    context: int | None
    """Tokens per request in the cache."""
    staged_tokens: int
    """Draft tokens per call."""
    launches: int | None = None
    """Kernels that a call launches."""
    bytes_moved: int | None = None
    """Bytes that a call must read and write, each counted once."""
    rounds: int | None = None
    """Timed rounds."""
    time_us: float | None = None
    """Median time of a call."""
    gb_per_s: float | None = None
    """`bytes_moved` over `time_us`, in 10^9 bytes/s."""
    time_over_nwor: float | None = None
    """This time over our kernel's, geometric mean over rounds; 2 means that ours takes half the
    time."""
    time_over_nwor_low: float | None = None
    """Low end of its 95 % interval."""
    time_over_nwor_high: float | None = None
    """High end of it."""
    reason: str = ""
    """Why there is no time, or that the GPU throttled."""
    heads: str | None = None
    """Query heads / K/V heads of attention."""


Call = Callable[[], object]


@dataclass(frozen=True)
class Implementation:
    """One implementation of a kernel's work, in one group.

    Attributes:
        name: `nwor` or a peer's.
        launches: kernels that a call launches.
        bytes_moved: bytes that a call must read and write.
        calls: one per set of buffers; a round over all sets finds none of its data in L2.
        check: makes one call on poisoned outputs; returns the fault, or an empty string.
    """

    name: str
    launches: int
    bytes_moved: int
    calls: Sequence[Call]
    check: Callable[[], str]


class RefusedError(Exception):
    """The implementation cannot run here; its rows show the reason instead of a time."""


@dataclass(frozen=True)
class Implementations:
    """All implementations of one group: those that can run, and why the others cannot, by name."""

    runnable: tuple[Implementation, ...]
    refused: Mapping[str, str]


Replay = Callable[[], float]
"""Runs one round of one implementation; the time of a call in us."""


class Stopwatch(Protocol):
    """Turns an implementation into rounds."""

    def prepare(self, implementation: Implementation) -> Replay:
        """A replay of its calls from a CUDA graph, with none of their data in L2."""


@dataclass(frozen=True)
class Bench:
    """Everything that times the groups.

    Attributes:
        build: makes a group's implementations and inputs; raises MemoryError if the inputs do not
            fit.
        stopwatch: makes their replays.
        throttled_ms: time so far in which power or temperature lowered the clocks; None: unknown.
        release: frees a group's memory.
    """

    spec: Spec
    build: Callable[[Group], Implementations]
    stopwatch: Stopwatch
    throttled_ms: Callable[[], float | None] = lambda: None
    release: Callable[[], None] = lambda: None


def with_peers(
    ours: Implementation, peers: Mapping[str, Callable[[], Implementation]]
) -> Implementations:
    """Our implementation and others, by name; those that cannot be made are refused."""
    made, refused = [ours], {}
    for name, make in peers.items():
        try:
            made.append(make())
        except RefusedError as refusal:
            refused[name] = str(refusal)
        except Exception as error:  # a foreign library may raise anything
            refused[name] = describe(error)
    return Implementations(tuple(made), refused)


def describe(error: Exception) -> str:
    """An error as a reason: its type and its first line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


def blank(group: Group, name: str, status: Status, reason: str = "") -> Row:
    """A row without a time."""
    return Row(
        kernel=group.kernel,
        implementation=name,
        status=status,
        cache_dtype=group.cache_dtype,
        requests=group.window.requests,
        drafts=group.window.drafts,
        acceptance=group.acceptance,
        context=group.context,
        staged_tokens=group.window.tokens,
        reason=reason,
        heads=None if group.heads is None else str(group.heads),
    )


def timed_rows(
    group: Group, timed: Sequence[Implementation], times: Mapping[str, Sequence[float]]
) -> list[Row]:
    """One row for each timed implementation, in the order of `timed`; times in us by name."""
    rows = []
    for each in timed:
        time_us = median(times[each.name])
        values = asdict(blank(group, each.name, Status.OK)) | _ratio(times, each.name)
        values |= {
            "launches": each.launches,
            "bytes_moved": each.bytes_moved,
            "rounds": len(times[each.name]),
            "time_us": time_us,
            "gb_per_s": each.bytes_moved / time_us / 1e3,
        }
        rows.append(Row(**values))
    return rows


def half_widths(times: Mapping[str, Sequence[float]]) -> list[float | None]:
    """Relative half width of each ratio's interval; None while there is no interval."""
    found: list[float | None] = []
    for name in times:
        if name != OURS and OURS in times:
            interval = paired_ratio(times[name], times[OURS])
            found.append(None if interval is None else interval.half_width / interval.ratio)
    return found


def _ratio(times: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """The time over ours, paired by round; empty for our own row."""
    if name == OURS or OURS not in times:
        return {}
    interval = paired_ratio(times[name], times[OURS])
    if interval is None:
        return {}
    return {
        "time_over_nwor": interval.ratio,
        "time_over_nwor_low": interval.low,
        "time_over_nwor_high": interval.high,
    }


@dataclass(frozen=True)
class Result:
    """One kernel run.

    Attributes:
        command: the command line.
        facts: facts about the device: `gpu`, `l2_bytes`, `copy_gb_per_s`.
        environment: from `nwor_bench.instruments.environment.collect`.
    """

    spec: Spec
    rows: Sequence[Row]
    command: str
    facts: dict[str, Any]
    environment: Environment
    elapsed_s: float

    @property
    def invalid(self) -> list[Row]:
        """Rows whose implementation gave a wrong result."""
        return [row for row in self.rows if row.status is Status.INVALID]
