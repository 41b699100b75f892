"""What is compared: windows of the same batch size and context, block by block."""

from dataclasses import replace
from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import change_windows, make_run

from nwor_bench.analysis.cell_data import CellData, gather_cells
from nwor_bench.analysis.paired import CONTEXT_STEP, LATENCY_MS, WINDOW_MS, pair_times
from nwor_bench.records.types import WindowRecord


def cells_of(run) -> dict[str, CellData]:
    return {cell.cell.label: cell for cell in gather_cells(run)}


def window(block: int, number: int, ms: float | None, reqs=2, drafts=8, accepted=3) -> WindowRecord:
    like = next(w for w in make_run(blocks=1).windows if w.cell.is_baseline)
    return replace(
        like, block=block, batch=block, window=number,
        num_reqs=reqs, draft_tokens=drafts, wall_ms=ms, accepted_tokens=accepted,
    )  # fmt: skip


def cell(windows: list[WindowRecord]) -> CellData:
    """A cell with one timed batch for each block of its windows, of the latency 1000 + block."""
    (batch, *_) = [b for b in make_run(blocks=1).batches if b.phase == "timed"]
    blocks = sorted({w.block for w in windows})
    timed = [replace(batch, block=b, batch=b, latency_ms=1000.0 + b) for b in blocks]
    return CellData(("toy", "off", "off", None), timed, timed, windows)


def test_equal_sequences_give_the_plain_mean_of_all_windows():
    run = make_run(blocks=4)
    found = cells_of(run)
    times = pair_times(found["stage x off"], found["off x off"])
    assert (times.compared, times.blocks) == (WINDOW_MS, (1, 2, 3, 4))
    assert (times.matched_windows, times.unmatched_windows) == (32, 0)
    for side, name in ((times.treated, "stage"), (times.baseline, "off")):
        for block, mean in zip(times.blocks, side, strict=True):
            own = [
                w.wall_ms
                for w in run.windows
                if (w.nwor_mode, w.scv_mode, w.block) == (name, "off", block)
            ]
            assert mean == pytest.approx(sum(own) / len(own))


def test_tokens_and_times_of_a_window_stand_beside_the_times():
    """Off: 3 windows of 5 tokens in 10 ms. Treated: windows of 5 and 8 in 9 and 15, one untimed."""
    ours = cell([window(1, 0, 9.0), window(1, 1, 15.0, accepted=6), window(1, 2, None)])
    theirs = cell([window(1, number, 10.0) for number in range(3)])
    found = pair_times(ours, theirs)
    assert found.token_logs == pytest.approx([log(6.5 / 5)])
    assert found.time_logs == pytest.approx([log(12 / 10)])
    idle = cell([replace(window(1, 0, 9.0, accepted=0), uncounted_draft_tokens=8)])
    assert pair_times(idle, theirs).token_logs == ()
    untimed = cell([window(1, 0, None)])
    whole = pair_times(ours, untimed)
    assert (whole.compared, whole.token_logs) == (LATENCY_MS, (0,))  # equal batches


@given(st.lists(st.floats(1, 100), min_size=2, max_size=6), st.integers(1, 5))
def test_more_windows_of_one_kind_do_not_weigh_more(times, extra):
    """The treated cell runs `extra` more small windows: they find no partner."""
    big = [window(1, i, ms) for i, ms in enumerate(times)]
    small = [window(1, 50 + i, 1.0, reqs=1, drafts=4) for i in range(extra)]
    found = pair_times(cell(big + small), cell(big))
    assert found.treated == pytest.approx(found.baseline)
    assert (found.matched_windows, found.unmatched_windows) == (len(times), extra)


def test_strata_are_weighed_alike_on_both_sides():
    """Two windows of 10 and one of 40 against one of 10 and two of 40: no difference."""
    ours = [window(1, 0, 10.0), window(1, 1, 10.0), window(1, 2, 40.0, drafts=4)]
    theirs = [window(1, 0, 10.0), window(1, 1, 40.0, drafts=4), window(1, 2, 40.0, drafts=4)]
    found = pair_times(cell(ours), cell(theirs))
    assert found.treated == found.baseline == (25.0,)
    assert (found.matched_windows, found.unmatched_windows) == (2, 2)


def test_windows_of_another_context_are_no_partners():
    """Each window yields 5 tokens for 2 requests; the late ones lie a step further on."""
    late = int(2 * CONTEXT_STEP / 5) + 1
    early = [window(1, i, 10.0) for i in range(late)]
    whole = [*early, *[window(1, late + i, 30.0) for i in range(late)]]
    found = pair_times(cell(whole), cell(early))
    assert found.treated[0] == pytest.approx(10.0)
    assert found.unmatched_windows == late


def test_a_window_without_a_time_is_no_partner_but_moves_the_context():
    """The last of eight windows has no time on one side: seven pairs, one left over."""
    run = change_windows(
        make_run(blocks=3), lambda w: (w.nwor_mode, w.block, w.window) == ("stage", 2, 7),
        wall_ms=None,
    )  # fmt: skip
    found = cells_of(run)
    times = pair_times(found["stage x off"], found["off x off"])
    assert (times.compared, times.matched_windows, times.unmatched_windows) == (WINDOW_MS, 23, 1)


def test_a_block_without_partners_or_window_times_leaves_the_batches_latency():
    run = change_windows(
        make_run(blocks=3), lambda w: (w.nwor_mode, w.block) == ("stage", 2), wall_ms=None
    )
    found = cells_of(run)
    times = pair_times(found["stage x off"], found["off x off"])
    assert times.compared == LATENCY_MS
    assert times.matched_windows is times.unmatched_windows is None
    assert times.treated == tuple(b.latency_ms for b in found["stage x off"].timed)
    lone = cell([window(1, 0, 9.0)])
    other = pair_times(lone, cell([window(1, 0, 9.0, reqs=1)]))
    assert (other.compared, other.treated, other.baseline) == (LATENCY_MS, (1001.0,), (1001.0,))
    assert pair_times(lone, cell([window(2, 0, 9.0)])) is None  # no common block
