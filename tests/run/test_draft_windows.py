"""Windows between groups belong to the draft count that they verified, not to the batch's."""

from dataclasses import replace

import pytest

from nwor_bench.records.cell import AA, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.types import Phase, WindowRecord
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.run.batch import BatchPlace
from nwor_bench.workload.schedule import Block

CELLS = tuple(Cell("tiny", NworMode.OFF, ScvMode.OFF, arm) for arm in (Drafts(0), Drafts(2), AA))
ORDER = WindowOrder(CELLS, compared_pairs(CELLS), "0")
PLACE = BatchPlace(CELLS[0], Phase.INTERLEAVED, Block(1, (), ()), 7, 0, "", ORDER)


def window(cell: int | None, drafts: int) -> WindowRecord:
    return WindowRecord(
        num_reqs=3,
        draft_tokens=drafts,
        staged_tokens=0,
        committed_tokens=0,
        rejected_tokens=0,
        stage_operations=0,
        fallback_reason=None,
        cell_number=cell,
    )


@pytest.mark.parametrize(
    ("cell", "drafts", "arm"),
    [
        (1, 6, Drafts(2)),
        (2, 0, AA),
        (None, 6, Drafts(2)),
        (None, 0, Drafts(0)),
        (None, 3, Drafts(0)),  # k = 1 is no cell
    ],
)
def test_the_cell_of_a_window(cell: int | None, drafts: int, arm: str) -> None:
    assert PLACE.cell_of(window(cell, drafts)).arm == arm


def test_a_window_between_groups_is_of_mode_off() -> None:
    """There the hook's mode is off, whatever the group before it staged."""
    staged = replace(CELLS[1], nwor_mode=NworMode.STAGE)
    cells = (*CELLS[:2], staged, CELLS[2])
    place = replace(PLACE, window_order=WindowOrder(cells, compared_pairs(cells), "0"))
    assert place.cell_of(window(None, 6)) == CELLS[1]
    assert place.cell_of(window(2, 6)) == staged
