"""What weakens a run's numbers, and what to do about it: found, typed, and told by cause."""

from nwor_bench.analysis.findings.finding import Finding, FindingKind, Severity
from nwor_bench.analysis.findings.grouped import FindingGroup, grouped
from nwor_bench.analysis.findings.run import find_all
from nwor_bench.analysis.findings.time_budget import nothing_timed, sufficient_budget

__all__ = [
    "Finding",
    "FindingGroup",
    "FindingKind",
    "Severity",
    "find_all",
    "grouped",
    "nothing_timed",
    "sufficient_budget",
]
