"""A finding: something that weakens a run's numbers, and what to do about it."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

HOST_REMEDY = (
    "These times are the host's more than the GPU's. Take a quieter or faster host, give the "
    "process cores of its own (taskset), or write more --requests."
)
"""What to do where the host sets the pace."""


class Severity(StrEnum):
    """`note`: worth knowing. `warning`: it weakens a number. `error`: do not use the numbers."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class FindingKind(StrEnum):
    """What was found; the names are part of run.json's format."""

    AA_DIFFERS = "aa_differs"
    AA_MISSING = "aa_missing"
    NOISE_FLOOR = "noise_floor"
    FEW_BLOCKS = "few_blocks"
    AMBIGUOUS = "ambiguous"
    OUTLIERS = "outliers"
    WARMUP = "warmup"
    TREND = "trend"
    THROTTLING = "throttling"
    CLOCKS = "clocks"
    GPU_SHARED = "gpu_shared"
    CPU_BUSY = "cpu_busy"
    CPU_STEAL = "cpu_steal"
    HOST_PACE = "host_pace"
    LAUNCHES = "launches"
    MEMORY_PRESSURE = "memory_pressure"
    FALLBACKS = "fallbacks"
    INEFFECTIVE = "ineffective"
    UNMATCHED = "unmatched_windows"
    LATENCY = "latency_compared"
    TORN = "torn_records"
    SUPERSEDED = "superseded"
    WINDOWS_DISAGREE = "windows_disagree"
    CARRY_OVER = "carry_over"
    LONG_WINDOWS = "long_windows"
    CLOCK_EFFECT = "clock_effect"
    GROUPS_LEFT_OUT = "groups_left_out"
    FEW_GROUPS = "few_groups"
    TIME_BUDGET = "time_budget"


@dataclass(frozen=True)
class Finding:
    """Something that weakens the run's numbers. `cell` is a cell's label where it is one cell's."""

    kind: FindingKind
    severity: Severity
    message: str
    remedy: str
    cell: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)
