"""Findings are told by cause: one line each, none lost, the severest first."""

import pytest

from nwor_bench.analysis.findings.run import ON_CPU
from nwor_bench.analysis.findings.table import TABLE, Finding, FindingKind, Severity, grouped


def found(kind: FindingKind, severity: Severity, cell: str | None = None) -> Finding:
    return Finding(kind, severity, "Message.", TABLE[kind].remedy, cell)


def test_cells_of_one_cause_share_a_line() -> None:
    cells = [f"stage x {mode}" for mode in ("off", "graph", "adaptive")]
    findings = [found(FindingKind.AMBIGUOUS, Severity.WARNING, cell) for cell in cells]
    (group,) = grouped(findings)
    assert group.line.startswith("3 cells are too uncertain: add blocks (--batches ")
    assert group.findings == tuple(findings)
    (alone,) = grouped(findings[:1])
    assert alone.line.startswith("1 cell is too uncertain: ")


def test_two_findings_of_one_cell_are_one_cell() -> None:
    (group,) = grouped([found(FindingKind.FALLBACKS, Severity.NOTE, "stage x off")] * 2)
    assert group.line.startswith("1 cell has ")


@pytest.mark.parametrize("kind", FindingKind)
def test_every_kind_has_a_line(kind: FindingKind) -> None:
    severity = Severity.WARNING
    (group,) = grouped([found(kind, severity, f"stage x {number}") for number in range(12)])[:1]
    assert len(f"{severity}: {group.line}") <= 80
    assert group.findings


def test_the_severest_comes_first_and_speaks_for_its_group() -> None:
    groups = grouped(
        [
            found(FindingKind.UNMATCHED, Severity.NOTE, "stage x off"),
            found(FindingKind.FALLBACKS, Severity.NOTE, "stage x off"),
            found(FindingKind.FALLBACKS, Severity.WARNING, "stage x graph"),
            found(FindingKind.AA_DIFFERS, Severity.ERROR, "off x off A/A"),
        ]
    )
    assert [group.severity for group in groups] == [Severity.ERROR, Severity.WARNING, Severity.NOTE]
    assert sum(len(group.findings) for group in groups) == 4


def test_on_a_cpu_no_group_asks_for_blocks():
    cells = [
        Finding(FindingKind.AMBIGUOUS, Severity.WARNING, f"{name} is AMBIGUOUS.", ON_CPU, name)
        for name in "ab"
    ]
    (group,) = grouped(cells)
    assert group.line == "2 cells are too uncertain: nothing to do"
