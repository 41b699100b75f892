"""Findings are grouped by cause, one line each, and none is lost."""

from nwor_bench.analysis.finding import Finding, FindingKind, Severity
from nwor_bench.analysis.findings import ON_CPU, grouped


def found(
    kind: FindingKind,
    severity: Severity = Severity.WARNING,
    cell: str | None = None,
    remedy: str = "Add blocks.",
) -> Finding:
    return Finding(kind, severity, f"{kind} of {cell}.", remedy, cell)


CELLS = [found(FindingKind.AMBIGUOUS, cell=f"stage x {name}") for name in "abcde"]


def test_five_uncertain_cells_are_one_line():
    noise = found(FindingKind.NOISE_FLOOR)
    few = found(FindingKind.FEW_BLOCKS, Severity.NOTE)
    clocks = found(FindingKind.CLOCKS)
    groups = grouped([noise, *CELLS, clocks, few])
    assert [group.line for group in groups] == [
        "5 cells are too uncertain: add blocks (four times as many halve the interval).",
        "clocks of None. Add blocks.",
    ]
    assert groups[0].findings == (noise, *CELLS, few)
    assert groups[0].severity is Severity.WARNING


def test_one_finding_keeps_its_own_words():
    (group,) = grouped(CELLS[:1])
    assert group.line == f"{CELLS[0].message} {CELLS[0].remedy}"


def test_few_blocks_alone_are_no_uncertain_cell():
    (group,) = grouped([found(FindingKind.FEW_BLOCKS, Severity.NOTE)])
    assert group.line == "few_blocks of None. Add blocks."


def test_a_group_is_as_severe_as_its_severest():
    notes = [found(FindingKind.FALLBACKS, Severity.NOTE, "a"), found(FindingKind.FALLBACKS)]
    (group,) = grouped(notes)
    assert group.severity is Severity.WARNING
    assert group.line.startswith("2 cells wrote some windows directly: ")


def test_on_a_cpu_no_group_asks_for_blocks():
    cells = [found(FindingKind.AMBIGUOUS, cell=name, remedy=ON_CPU) for name in "ab"]
    (group,) = grouped(cells)
    assert group.line == (
        "2 cells are too uncertain: nothing to do, as times on a CPU say nothing of NWOR on a GPU."
    )


def test_every_kind_can_stand_twice_and_nothing_is_lost():
    for kind in FindingKind:
        own = [found(kind, cell="a"), found(kind, cell="b")]
        groups = grouped(own)
        assert [finding for group in groups for finding in group.findings] == own
        assert all(group.line.endswith(".") for group in groups)
