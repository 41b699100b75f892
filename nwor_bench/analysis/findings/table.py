"""All kinds of findings in one table, and the findings of a run by cause."""

from collections.abc import Sequence
from dataclasses import dataclass

from nwor_bench.analysis.findings import drafter, engine, machine, sample
from nwor_bench.analysis.findings.finding import Evidence, Finding, FindingKind, Row, Severity

ROWS = sorted(
    (*sample.ROWS, *engine.ROWS, *machine.ROWS, *drafter.ROWS),
    key=lambda row: list(FindingKind).index(row.kind),
)
_rank = list(Severity).index


def find_all(evidence: Evidence) -> list[Finding]:
    """All findings of a run, the severest first."""
    every = [finding for row in ROWS for finding in row.findings(evidence)]
    return sorted(every, key=lambda finding: _rank(finding.severity), reverse=True)


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one cause."""

    severity: Severity
    """The severest of the findings."""
    line: str
    """Finding and remedy in one line."""
    findings: tuple[Finding, ...]


def grouped(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The findings by cause, the severest group first."""
    groups = []
    for row in ROWS:
        same = tuple(finding for finding in findings if finding.kind is row.kind)
        if same:
            severity = max((finding.severity for finding in same), key=_rank)
            groups.append(FindingGroup(severity, _line(row, same), same))
    return sorted(groups, key=lambda group: _rank(group.severity), reverse=True)


def _line(row: Row, findings: Sequence[Finding]) -> str:
    remedy = findings[0].remedy.split(". ")[0].rstrip(".")
    cells = len({finding.cell for finding in findings})
    where = f" ({cells} cells)" if cells > 1 else ""
    return f"{row.clause}{where}: {remedy[0].lower()}{remedy[1:]}"
