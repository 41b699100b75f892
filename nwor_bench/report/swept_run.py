"""One run of a sweep, with its place in it and its results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.cell_data import REFERENCE
from nwor_bench.analysis.findings.table import Finding, Severity
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunData
from nwor_bench.records.types import CellResult, NworMode
from nwor_bench.report.answer import Answer, answer


@dataclass(frozen=True)
class SweptRun:
    """A run's place in its sweep, and what it measured."""

    number: int
    """From 1, in the sweep file's order."""

    folder: str
    """Its folder, relative to the sweep's."""

    place: Mapping[str, Any]
    """Its value on each axis, by the axis' name; None if the axis has none."""

    words: Mapping[str, str]
    """The same for people: `8 requests`."""

    status: str
    """`pending`, `done`, `failed` or `interrupted`."""

    error: str | None
    """Why it failed."""

    analysis: Analysis | None
    """What its records say; None if it never started."""

    @property
    def data(self) -> RunData | None:
        """Its records; None if it never started."""
        return None if self.analysis is None else self.analysis.run

    @property
    def cells(self) -> tuple[CellResult, ...]:
        """Summaries of its cells; empty without records."""
        return () if self.analysis is None else self.analysis.cells

    @cached_property
    def answer(self) -> Answer | None:
        """The run's own answer; None without cells."""
        if self.data is None or not self.cells:
            return None
        return answer(self.data.header, self.cells)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings and errors of the run."""
        if self.analysis is None or not self.cells:
            return ()
        return tuple(each for each in self.analysis.findings if each.severity != Severity.NOTE)

    @property
    def compared(self) -> tuple[CellResult, ...]:
        """Cells with a ratio, but for A/A."""
        return tuple(c for c in self.cells if c.arm is None and c.ratio_to_off is not None)

    @property
    def baseline(self) -> CellResult | None:
        """off x off."""
        return next((c for c in self.cells if c.arm is None and c.verdict == REFERENCE), None)

    @property
    def data_types(self) -> str | None:
        """Data type of the model, and of the cache if it differs; None if unknown."""
        if self.data is None:
            return None
        model = self.data.header.data_type
        cache = (self.data.header.engine or EngineStatus()).kv_cache_dtype
        other = cache not in (None, "auto", model)
        return f"{model}, {cache} cache" if model and other else model

    def cell(self, label: str) -> CellResult | None:
        """The cell of that name."""
        return next((cell for cell in self.cells if cell.label == label), None)


def varying(runs: Sequence[SweptRun]) -> tuple[str, ...]:
    """The axes on which these runs differ."""
    names = runs[0].place if runs else {}
    return tuple(name for name in names if len({repr(run.place.get(name)) for run in runs}) > 1)


def label_of_run(run: SweptRun, axes: Sequence[str]) -> str:
    """The run's words on these axes: `8 requests, 4 drafts`; all of them if none varies."""
    parts = [run.words[name] for name in axes or run.words if name in run.words]
    return ", ".join(parts) or run.folder


def labels(runs: Sequence[SweptRun]) -> list[str]:
    """Names of the compared cells of all runs, those with NWOR on first."""
    every = [cell for run in runs for cell in run.compared]
    ordered = sorted(every, key=lambda cell: cell.nwor_mode == NworMode.OFF)
    return list(dict.fromkeys(cell.label for cell in ordered))
