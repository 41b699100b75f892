"""Machine and software of a run, as stored in run.json. Unread values are None or empty, not 0."""

from collections.abc import Mapping
from dataclasses import dataclass

from nwor_bench.records.json_part import JsonPart


@dataclass(frozen=True, kw_only=True)
class CpuFacts(JsonPart):
    """The processor, and the machine's load when the run began."""

    model: str | None = None
    """As /proc/cpuinfo names it."""

    architecture: str | None = None
    """Such as x86_64."""

    cores: int | None = None
    """Physical cores."""

    threads: int | None = None
    """Hardware threads."""

    usable_threads: int | None = None
    """Hardware threads that this process may use (Linux)."""

    governor: str | None = None
    """Frequency governor of the first core; virtual machines often hide it."""

    load_1min: float | None = None
    """Runnable processes, mean of the last minute."""

    load_5min: float | None = None
    """Runnable processes, mean of the last five minutes."""


@dataclass(frozen=True, kw_only=True)
class MemoryFacts(JsonPart):
    """The host's memory, in bytes."""

    total_bytes: int | None = None
    """Memory in the machine."""

    available_bytes: int | None = None
    """Memory that programs could still get when the run began."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts(JsonPart):
    """One GPU by NVML, when the run began."""

    name: str | None = None
    """Product name."""

    driver: str | None = None
    """Version of the driver."""

    compute_capability: str | None = None
    """Such as 9.0."""

    memory_total_bytes: int | None = None
    """Memory of the GPU."""

    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors."""

    sm_clock_max_mhz: int | None = None
    """Highest clock of the multiprocessors."""

    memory_clock_mhz: int | None = None
    """Clock of the memory."""

    temperature_c: int | None = None
    """Temperature of the GPU."""

    power_limit_w: float | None = None
    """Enforced power limit."""

    throttle_reasons: int | None = None
    """NVML's bits for the reasons of reduced clocks; see `conditions.throttle_names`."""

    ecc: bool | None = None
    """Whether memory errors are corrected."""


@dataclass(frozen=True, kw_only=True)
class GitState(JsonPart):
    """Revision of the checkout that nwor-bench ran from; None for an installed copy."""

    revision: str | None = None
    """Commit."""

    dirty: bool | None = None
    """Whether there were uncommitted changes."""


@dataclass(frozen=True, kw_only=True)
class Environment(JsonPart):
    """Machine, GPUs, libraries, revision and settings; never who ran it, or on which host."""

    collected_at: str | None = None
    """UTC time."""

    command_line: tuple[str, ...] | None = None
    """Arguments of the process."""

    python: str | None = None
    """Version of Python."""

    os: str | None = None
    """Name and version of the operating system."""

    cpu: CpuFacts | None = None
    """The processor."""

    memory: MemoryFacts | None = None
    """The host's memory."""

    gpus: tuple[GpuFacts, ...] | None = None
    """The GPUs that the process saw."""

    gpu_note: str | None = None
    """Why there are no GPUs, if there are none."""

    packages: Mapping[str, str | None] | None = None
    """Version by distribution; None for one that is not installed."""

    git: GitState | None = None
    """The checkout that nwor-bench ran from."""

    settings: Mapping[str, str | None] | None = None
    """Environment variables that affect a run; None for one that is not set."""
