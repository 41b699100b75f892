"""Arms of cells: their names in records, and their order in tables."""

import pytest

from nwor_bench.records.cell import (
    AA,
    ADAPTIVE,
    Arguments,
    Cell,
    Drafts,
    NworMode,
    ScvMode,
    cell_order,
    read_arm,
)

IN_ORDER = (None, Drafts(0), Drafts(2), Drafts(10), Drafts(ADAPTIVE), AA, Arguments("a=1"))
CELLS = [Cell("tiny", NworMode.OFF, ScvMode.OFF, arm) for arm in IN_ORDER]


def test_a_record_has_the_arm_that_was_written() -> None:
    names = [cell.names["arm"] for cell in CELLS]
    assert names == [None, "k=0", "k=2", "k=10", "k=adaptive", "A/A", "a=1"]
    assert [Cell.from_names(cell.names) for cell in CELLS] == CELLS
    with pytest.raises(ValueError, match="most"):
        read_arm("k=most")


def test_draft_counts_ascend_before_adaptive_verification_and_the_second_reference() -> None:
    backwards = CELLS[::-1]
    assert sorted(backwards, key=cell_order) == CELLS
    labels = [cell.label for cell in CELLS[1:5]]
    assert labels == ["k = 0", "k = 2", "k = 10", "k = adaptive"]
    assert [cell.fixed_drafts for cell in CELLS] == [0, 0, 2, 10, 0, 0, 0]
