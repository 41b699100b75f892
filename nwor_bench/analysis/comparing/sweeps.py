"""Two sweeps compared run by run. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nwor_bench.analysis.comparing.change_verdicts import ChangeVerdict
from nwor_bench.analysis.comparing.compare import Comparison
from nwor_bench.analysis.comparing.stored_run import StoredRun
from nwor_bench.errors import ExitCode, NotComparableError

Compare = Callable[[StoredRun, StoredRun], Comparison]
"""`compare_runs` with everything but the two runs."""

SEPARATOR = ", "
"""Between the words of a run's name."""

WORST_FIRST = (
    ChangeVerdict.REGRESSION,
    ChangeVerdict.AMBIGUOUS,
    ChangeVerdict.ONLY_IN_BASE,
    ChangeVerdict.ONLY_IN_NEW,
    ChangeVerdict.IMPROVEMENT,
    ChangeVerdict.SAME,
    ChangeVerdict.NOT_COMPARED,
)
"""The order in which a run's cells make its own verdict."""


@dataclass(frozen=True)
class RunChange:
    """One run that both sweeps have."""

    name: str
    """Its place on the axes, for people."""

    comparison: Comparison

    @property
    def outcome(self) -> ChangeVerdict:
        """The worst verdict of its cells."""
        found = {cell.outcome for cell in self.comparison.cells}
        return next(outcome for outcome in WORST_FIRST if outcome in found)


@dataclass(frozen=True)
class SweepComparison:
    """Two sweeps, matched by their runs' places on the axes."""

    base: Path
    new: Path

    runs: tuple[RunChange, ...]
    """Those that both have, in BASE's order."""

    only_in_base: tuple[str, ...]
    """Names of runs that NEW lacks, or did not measure."""

    only_in_new: tuple[str, ...]
    """Names of runs that BASE lacks, or did not measure."""

    def having(self, outcome: ChangeVerdict) -> list[RunChange]:
        """The runs with that verdict."""
        return [run for run in self.runs if run.outcome is outcome]

    def exit_code(self, *, strict: bool = False) -> ExitCode:
        """REGRESSION if a run regressed; `strict`: INCONCLUSIVE if one is AMBIGUOUS or gone."""
        codes = {run.comparison.exit_code(strict=strict) for run in self.runs}
        if strict and self.only_in_base:
            codes.add(ExitCode.INCONCLUSIVE)
        return next(
            (code for code in (ExitCode.REGRESSION, ExitCode.INCONCLUSIVE) if code in codes),
            ExitCode.OK,
        )


def compare_sweeps(
    folders: tuple[Path, Path],
    base: Mapping[str, StoredRun],
    new: Mapping[str, StoredRun],
    compare: Compare,
) -> SweepComparison:
    """Match two sweeps' runs by name, and compare each with its own.

    Args:
        folders: of BASE and NEW.
        base: BASE's runs by their names, which are the same for the same place on the axes.
        new: NEW's.
        compare: compares two runs.

    Raises NotComparableError, naming the run, if two of them cannot be compared, or if the sweeps
    have no run in common.
    """
    common = [name for name in base if name in new]
    if not common:
        raise NotComparableError.at(
            "BASE and NEW have no run in common",
            f"BASE has {_names(base)}; NEW has {_names(new)}",
        )
    short = short_names([*base, *new])
    changes = []
    for name in common:
        try:
            changes.append(RunChange(short[name], compare(base[name], new[name])))
        except NotComparableError as error:
            raise error.within(f"run {name}") from error
    return SweepComparison(
        base=folders[0],
        new=folders[1],
        runs=tuple(changes),
        only_in_base=tuple(short[name] for name in base if name not in new),
        only_in_new=tuple(short[name] for name in new if name not in base),
    )


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each name without the parts, set apart by commas, that all of them have."""
    parts = {name: name.split(SEPARATOR) for name in names}
    shared = set.intersection(*map(set, parts.values()))
    return {
        name: SEPARATOR.join(part for part in own if part not in shared) or name
        for name, own in parts.items()
    }


def _names(runs: Mapping[str, StoredRun]) -> str:
    return "; ".join(runs) or "none that was measured"
