"""Which of a run's windows belong together."""

from dataclasses import replace

from synthetic_run import make_run

from nwor_bench.analysis.invariants import cell_key, full_windows, is_baseline, windows_by_batch
from nwor_bench.records.lines import batch_key


def test_windows_in_which_a_request_had_finished_are_not_full():
    run = make_run(blocks=3)
    chosen = [b for b in run.batches if b.phase == "timed" and is_baseline(cell_key(b))]
    batch, other = chosen[:2]
    short = windows_by_batch(run)[batch_key(batch)][2]
    windows = tuple(replace(w, num_reqs=batch.requests - (w is short)) for w in run.windows)
    grouped = windows_by_batch(replace(run, windows=windows))
    full = full_windows([batch, other], grouped)
    everything = [*grouped[batch_key(batch)], *grouped[batch_key(other)]]
    assert full == [*everything[:2], *everything[3:]]


def test_the_second_off_x_off_is_not_the_baseline():
    run = make_run(blocks=3, aa=True)
    keys = {cell_key(batch) for batch in run.batches}
    assert [key for key in keys if is_baseline(key)] == [("toy", "off", "off", None)]
