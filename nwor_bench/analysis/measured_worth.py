"""Runs of draft counts that are told together: those of one scenario, by batch size. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nwor_bench.analysis.analyse import Analysis
from nwor_bench.analysis.draft_rates import Rate, Worth
from nwor_bench.analysis.worth import Measured, WindowTime, batch_size, window_times, worth_of
from nwor_bench.records.cell import NworMode
from nwor_bench.records.header import RunHeader
from nwor_bench.records.types import CellResult


def by_drafts(header: RunHeader) -> bool:
    """True for a run whose cells are draft counts."""
    return (header.spec or {}).get("draft_counts") is not None


@dataclass(frozen=True)
class MeasuredWorth:
    """What the runs of one pair and scenario say together."""

    analyses: tuple[Analysis, ...]
    worth: Worth
    times: tuple[WindowTime, ...]
    """By batch size and draft count."""

    @property
    def header(self) -> RunHeader:
        """The first run's; the others differ in the batch size."""
        return self.analyses[0].run.header

    @property
    def staged(self) -> dict[tuple[int, int], CellResult]:
        """The staged cells by batch size and draft count."""
        return {
            (batch_size(each.run), cell.cell.drafts or 0): cell
            for each in self.analyses
            for cell in each.cells
            if cell.nwor_mode != NworMode.OFF
        }


def measured_worth(analyses: Sequence[Analysis]) -> MeasuredWorth:
    """Work it out once; a single run's is known already."""
    worth = analyses[0].worth if len(analyses) == 1 else None
    if worth is None:
        worth = worth_of([Measured(each.run, each.effects) for each in analyses])
    times = tuple(window_times([each.run for each in analyses]))
    found = MeasuredWorth(tuple(analyses), worth, times)
    staged = found.staged
    rates = tuple(_as_judged(r, staged.get((r.requests, r.drafts))) for r in worth.rates)
    return replace(found, worth=replace(worth, rates=rates))


def _as_judged(rate: Rate, staged: CellResult | None) -> Rate:
    """The rate with the verdict of its staged cell, which may have no ratio to trust."""
    if staged is None:
        return rate
    judged = replace(rate, stage_verdict=str(staged.verdict))
    if staged.tokens_per_s_ratio is None:
        return replace(judged, stage_ratio=None, stage_low=None, stage_high=None)
    return judged
