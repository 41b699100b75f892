"""Which of a run's windows belong together."""

from dataclasses import replace

from synthetic_run import make_run

from nwor_bench.analysis.invariants import full_windows, windows_by_batch
from nwor_bench.records.lines import batch_key
from nwor_bench.records.types import Cell, NworMode, ScvMode


def test_windows_in_which_a_request_had_finished_are_not_full():
    run = make_run(blocks=3)
    chosen = [b for b in run.batches if b.phase == "timed" and b.cell.is_baseline]
    batch, other = chosen[:2]
    short = windows_by_batch(run)[batch_key(batch)][2]
    windows = tuple(replace(w, num_reqs=batch.requests - (w is short)) for w in run.windows)
    grouped = windows_by_batch(replace(run, windows=windows))
    full = full_windows([batch, other], grouped)
    everything = [*grouped[batch_key(batch)], *grouped[batch_key(other)]]
    assert full == [*everything[:2], *everything[3:]]


def test_the_second_off_x_off_is_not_the_baseline():
    run = make_run(blocks=3, aa=True)
    keys = {batch.cell for batch in run.batches}
    assert [cell for cell in keys if cell.is_baseline] == [Cell("toy", NworMode.OFF, ScvMode.OFF)]
