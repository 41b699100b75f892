"""Bytes by cell: which windows count, and differences on the same windows, on made-up runs."""

import re
from dataclasses import replace
from random import Random

import pytest
from scipy import stats as reference
from synthetic_run import BYTES_PER_TOKEN, analysed, make_run, with_header

from nwor_bench.analysis.dram import CellBytes, cell_bytes, predicted_difference
from nwor_bench.analysis.invariants import accepted, windows_by_batch
from nwor_bench.models.byte_model import BY_REFERENCE, COPY_SPILLED
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.lines import batch_key
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING
from nwor_bench.report.document import Document
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.window_costs import dram_summary, traffic_section

WRITTEN = 214_000_000
SAVED = 1_800_000


def counted_run(blocks: int = 6, noise: float = 20_000.0) -> RunData:
    """A run with a counted batch for each timed one: stage writes SAVED bytes less, reads more.

    What a window writes grows with what was generated, as a real one's reads do.
    """
    run = make_run(blocks=blocks, windows=12, aa=True)
    rng = Random(3)
    batches, windows = list(run.batches), list(run.windows)
    of_batch = windows_by_batch(run)
    for batch in run.batches:
        if batch.phase != "timed":
            continue
        number, generated = batch.batch + 10_000, 0
        batches.append(replace(batch, phase="counters", batch=number))
        for window in of_batch[batch_key(batch)]:
            less = SAVED if window.nwor_mode == "stage" else 0
            read = round(9e9 + 1e6 * generated + less / 2)
            written = round(WRITTEN + 1e5 * generated - less + rng.gauss(0, noise))
            counted = replace(window, dram_read_bytes=read, dram_write_bytes=written)
            windows.append(replace(counted, batch=number))
            generated += accepted(window) + window.num_reqs
    return replace(run, batches=tuple(batches), windows=tuple(windows))


def by_label(run: RunData) -> dict[str, CellBytes]:
    return {cell.cell.label: cell for cell in cell_bytes(run)}


def section_of(run: RunData) -> str:
    return render_markdown(Document("x", (), (traffic_section(analysed(run)),)))


def test_a_planted_difference_is_found_within_its_interval() -> None:
    run = with_header(counted_run(), "engine", dtype="float32")
    cells = by_label(run)
    assert len(cells) == 7
    stage = cells["stage x graph"]
    written = stage.differences["dram_write_bytes"]
    assert written.holds(-SAVED)
    assert not written.holds(0)
    assert abs(written.value + SAVED) < 20_000
    assert stage.visible["dram_write_bytes"] < SAVED
    assert cells["off x off (A/A)"].differences["dram_write_bytes"].holds(0)
    read = cells["stage x off"].differences["dram_read_bytes"]
    assert read.value == pytest.approx(SAVED / 2, abs=1)
    assert cells["off x off"].differences == {}
    wanted = (stage.accepted - stage.staged) * BYTES_PER_TOKEN
    assert stage.predicted["dram_write_bytes"] == pytest.approx(wanted)
    text = section_of(run)
    assert "stage x graph wrote 1.8" in text
    assert "MB a window fewer than off x off" in text


def test_a_difference_below_the_noise_is_not_called() -> None:
    run = counted_run(noise=6e6)
    stage = by_label(run)["stage x graph"]
    assert stage.differences["dram_write_bytes"].holds(0)
    assert stage.visible["dram_write_bytes"] > SAVED
    assert "stage x graph: no difference in writes was visible (one of " in section_of(run)


def test_the_visible_difference_is_that_of_four_runs_in_five() -> None:
    """Computed by hand from the blocks' differences: Student's t at 0.05 / 6 comparisons."""
    run = counted_run()
    found = by_label(run)["stage x graph"]
    interval = found.differences["dram_write_bytes"]
    t = reference.t(5)
    error = (interval.high - interval.low) / 2 / t.ppf(0.975)
    wanted = (t.ppf(1 - 0.05 / 2 / 6) + t.ppf(0.8)) * error
    assert found.visible["dram_write_bytes"] == pytest.approx(wanted)


def test_too_few_blocks_give_only_a_mean() -> None:
    run = counted_run(blocks=2)
    stage = by_label(run)["stage x graph"]
    assert not stage.differences["dram_write_bytes"].is_bounded
    assert stage.visible == {}
    text = section_of(run)
    assert "stage x graph: too few blocks for an interval of its writes" in text
    assert "inf" not in text


def test_first_windows_and_smaller_ones_are_left_out() -> None:
    run = counted_run(blocks=3)
    before = by_label(run)["off x off"]
    assert before.windows == 3 * (12 - SETTLING)
    # Poison what must not count: the first windows of each batch, and those of fewer requests.
    spoilt = []
    for window in run.windows:
        if window.dram_write_bytes is None:
            spoilt.append(window)
        elif window.window < SETTLING:
            spoilt.append(replace(window, dram_write_bytes=10**15))
        elif window.window == 5:
            spoilt.append(replace(window, num_reqs=1, dram_write_bytes=10**15))
        else:
            spoilt.append(window)
    after = cell_bytes(replace(run, windows=tuple(spoilt)))[0]
    assert after.windows == before.windows - 3
    assert after.amounts["dram_write_bytes"].value < 2 * WRITTEN


def test_windows_at_other_places_are_not_compared() -> None:
    run = counted_run(blocks=3)
    # One more token accepted early on in stage: from there on no window has a partner.
    moved = tuple(
        replace(w, committed_tokens=w.committed_tokens + 1, rejected_tokens=w.rejected_tokens - 1)
        if w.dram_write_bytes and w.nwor_mode == "stage" and w.window == 6 and w.rejected_tokens
        else w
        for w in run.windows
    )
    cells = by_label(replace(run, windows=moved))
    assert cells["stage x graph"].matched < cells["off x graph"].matched
    assert abs(cells["stage x graph"].differences["dram_write_bytes"].value + SAVED) < 40_000


def test_batches_too_short_to_count_show_no_number_and_say_what_to_do() -> None:
    """Every window stands among the first of its batch."""
    run = counted_run(blocks=3)
    short = tuple(w for w in run.windows if w.dram_write_bytes is None or w.window < SETTLING)
    run = replace(run, windows=short)
    assert {(cell.staged, cell.accepted) for cell in cell_bytes(run)} == {(None, None)}
    for cell in cell_bytes(run):
        assert cell.windows == cell.blocks == cell.matched == 0
        assert cell.amounts == cell.differences == cell.predicted == {}
    text = section_of(run)
    assert "stage x graph: no window counts" in text
    assert "write a larger --max-new-tokens" in text
    assert not re.search(r"\| +0\.0+ ", text)


def test_a_run_without_counters_has_no_section() -> None:
    run = make_run()
    assert cell_bytes(run) == []
    assert dram_summary(analysed(run).dram) is None


HELD = {"bytes_per_token": 1000, "dtype": "bfloat16"}
STATES = {**HELD, "state_bytes": 100, "state_record_token_bytes": 10}


@pytest.mark.parametrize(
    ("facts", "strategy", "requests", "read", "written"),
    [
        (HELD, BY_REFERENCE, 0, 12_000, 12_000 - 32_000),
        ({**HELD, "kv_cache_dtype": "bfloat16"}, COPY_SPILLED, 8, 12_000, 12_000),
        # fp8: 1,000 bytes are one byte an element in the cache, two as activations.
        ({**HELD, "kv_cache_dtype": "fp8"}, BY_REFERENCE, 0, 24_000, 12_000 - 32_000),
        # By reference each request's certain first token is read back too.
        ({**HELD, "kv_cache_dtype": "fp8"}, BY_REFERENCE, 8, 24_000 + 16_000, 12_000 - 32_000),
        # Read: 8 states again, and the records of 8 first tokens and 12 drafts. Written: 40
        # records, and 8 states instead of 40.
        (STATES, BY_REFERENCE, 8, 20_000 + 8 * 100 + 20 * 10, -20_000 + 40 * 10 - 32 * 100),
        ({"dtype": "bfloat16"}, BY_REFERENCE, 8, None, None),
        ({**HELD, "dtype": "odd"}, BY_REFERENCE, 8, None, None),
        ({**HELD, "kv_cache_dtype": "odd"}, BY_REFERENCE, 8, None, None),
    ],
)  # fmt: skip
def test_the_prediction_is_the_byte_models(facts, strategy, requests, read, written) -> None:
    """32 drafts, of which 12 are accepted. Without the engine's sizes nothing is predicted."""
    found = predicted_difference(EngineStatus(**facts), 32, 12, strategy, requests)
    wanted = {} if read is None else {"dram_read_bytes": read, "dram_write_bytes": written}
    assert found == wanted
