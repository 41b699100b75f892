"""Runs of draft counts that are told together: those of one scenario, by batch size. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.draft_rates import Worth
from nwor_bench.analysis.worth import WindowTime, batch_size, window_times, worth_of
from nwor_bench.records.cell import NworMode
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import CellResult


@dataclass(frozen=True)
class MeasuredWorth:
    """What the runs of one pair and scenario say together."""

    analyses: tuple[Analysis, ...]
    worth: Worth
    times: tuple[WindowTime, ...]
    """By batch size and draft count."""
    left_out: tuple[int, ...] = ()
    """Batch sizes that the time budget had no room for."""

    @property
    def header(self) -> RunHeader:
        """The first run's; the others differ in the batch size."""
        return self.analyses[0].run.header

    @property
    def staged(self) -> dict[tuple[int, int], CellResult]:
        """The staged cells by batch size and draft count."""
        return {
            (batch_size(analysis.run), cell.cell.fixed_drafts): cell
            for analysis in self.analyses
            for cell in analysis.cells
            if cell.nwor_mode != NworMode.OFF
        }


def measured_worth(analyses: Sequence[Analysis], left_out: Iterable[int] = ()) -> MeasuredWorth:
    """Work it out once; a single run's is known already."""
    runs = [analysis.measured for analysis in analyses]
    worth = analyses[0].worth if len(analyses) == 1 else None
    return MeasuredWorth(
        tuple(analyses), worth or worth_of(runs), tuple(window_times(runs)), tuple(sorted(left_out))
    )
