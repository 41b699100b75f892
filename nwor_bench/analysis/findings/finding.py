"""A finding, typed so that a report can group it and a CI job can act on it, and what finds it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from nwor_bench.analysis.effects import WINDOWS, PairEffect
from nwor_bench.records.cell import Cell
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunData
from nwor_bench.records.types import BatchRecord, CellResult, Phase


class Severity(StrEnum):
    """`note`: worth knowing. `warning`: it weakens a number. `error`: do not use the numbers."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


class FindingKind(StrEnum):
    """Kinds in the order of a report; the names are part of run.json's format."""

    TIME_BUDGET = "time_budget"
    AA_DIFFERS = "aa_differs"
    FEW_GROUPS = "few_groups"
    INEFFECTIVE = "ineffective"
    AMBIGUOUS = "ambiguous"
    FALLBACKS = "fallbacks"
    ELSEWHERE = "written_elsewhere"
    STATES = "states_by_stock"
    NO_GRAPH = "windows_without_graph"
    WINDOWS_DISAGREE = "windows_disagree"
    CARRY_OVER = "carry_over"
    LONG_WINDOWS = "long_windows"
    WARMUP = "warmup"
    TREND = "trend"
    HOST_PACE = "host_pace"
    ATTENTION = "attention_untimed"
    CLOCKS = "clocks"
    GPU_SHARED = "gpu_shared"
    CPU_BUSY = "cpu_busy"
    MEMORY_PRESSURE = "memory_pressure"
    DRAFTER_CONTEXT = "drafter_context"
    ACCEPTANCE = "as_random_drafts"
    CONCURRENCY = "fewer_requests_at_once"
    SHORT_OUTPUTS = "short_outputs"
    PREFIX_BLOCK = "prefix_block_dropped"


@dataclass(frozen=True)
class Finding:
    """Something that weakens the run's numbers; `cell` is a cell's label if it is one cell's."""

    kind: FindingKind
    severity: Severity
    message: str
    remedy: str
    cell: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What findings are found in."""

    run: RunData
    cells: Sequence[CellResult]
    effects: Mapping[Cell, PairEffect]
    """Effects of interleaved cells over off x off."""

    @property
    def engine(self) -> EngineStatus:
        """Facts of the engine; all None if it never started."""
        return self.run.header.engine

    @property
    def scenario(self) -> Mapping[str, Any]:
        """The run's scenario; empty if it is not known."""
        return self.run.header.scenario or {}

    @property
    def longest(self) -> int:
        """Tokens of the longest request: its prompt in the gate, and its output."""
        return self.scenario.get("max_new_tokens", 0) + (self.run.header.gate.longest_prompt or 0)

    @cached_property
    def timed(self) -> list[BatchRecord]:
        """Timed batches, noisy ones too: nothing is dropped because of a finding."""
        return [b for b in self.run.batches if b.phase in (Phase.TIMED, Phase.INTERLEAVED)]

    @cached_property
    def watched(self) -> list[BatchRecord]:
        """Timed batches whose conditions were recorded."""
        return [batch for batch in self.timed if batch.conditions]

    def conditions(self, name: str) -> list[float]:
        """A condition's value in each watched batch that has it."""
        return [batch.conditions[name] for batch in self.watched if name in batch.conditions]

    @cached_property
    def interleaved(self) -> list[tuple[CellResult, PairEffect]]:
        """Cells with a ratio that were interleaved with off x off."""
        return [
            (cell, self.effects[cell.cell])
            for cell in self.cells
            if cell.cell in self.effects and cell.interleaved and cell.ratio is not None
        ]

    @property
    def windows_decide(self) -> bool:
        """True if every ratio is that of neighbouring windows."""
        compared = [cell for cell in self.cells if cell.ratio is not None]
        return bool(compared) and all(cell.interleaved == WINDOWS for cell in compared)

    @property
    def compared_cells(self) -> int:
        """Number of cells with an effect, for Bonferroni's correction."""
        return sum(effect.decisive is not None for effect in self.effects.values())


@dataclass(frozen=True)
class Case:
    """One finding of a row: values of its placeholders, and texts that replace the row's."""

    values: Mapping[str, Any] = field(default_factory=dict)
    cell: str | None = None
    """A cell's label, the placeholder `{name}`."""
    severity: Severity | None = None
    sentence: str | None = None
    remedy: str | None = None


Cases = Iterator[Case]


@dataclass(frozen=True)
class Row:
    """One kind of finding."""

    kind: FindingKind
    condition: Callable[[Evidence], Cases]
    sentence: str
    """The message, with placeholders for a case's values."""
    remedy: str
    """What to do; a terminal shows the first sentence."""
    clause: str
    """All findings of the kind in a few words."""
    severity: Severity = Severity.WARNING

    def findings(self, evidence: Evidence) -> Iterator[Finding]:
        """The findings of this kind."""
        for case in self.condition(evidence):
            values = {**case.values, "name": case.cell}
            message = (case.sentence or self.sentence).format(**values)
            remedy = (case.remedy or self.remedy).format(**values)
            yield Finding(self.kind, case.severity or self.severity, message, remedy, case.cell)
