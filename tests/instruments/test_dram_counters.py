"""Bytes by cell: which windows count, and differences on the same windows, on made-up runs."""

import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference
from synthetic_run import BYTES_PER_TOKEN, analysed, make_run, with_header

from nwor_bench.analysis.dram import amount_of, cell_bytes, predicted_difference
from nwor_bench.analysis.invariants import accepted
from nwor_bench.models.byte_model import BY_REFERENCE, COPY_SPILLED
from nwor_bench.records.facts import EngineStatus
from nwor_bench.records.store import RunData
from nwor_bench.records.types import SETTLING, BatchRecord, WindowRecord
from nwor_bench.report.document import Document
from nwor_bench.report.markdown import render_markdown
from nwor_bench.report.window_costs import dram_summary, traffic_section

WRITTEN = 214_000_000
SAVED = 1_800_000
ENGINE = EngineStatus(bytes_per_token=1000, dtype="bfloat16", kv_cache_dtype="auto")


def counted_run(blocks: int = 6, noise: float = 20_000.0, seed: int = 3) -> RunData:
    """A run with a counted batch for each timed one: stage writes SAVED bytes less, reads more.

    What a window writes grows with what was generated, as a real one's reads do.
    """
    run = make_run(blocks=blocks, windows=12, aa=True)
    rng = Random(seed)
    batches: list[BatchRecord] = list(run.batches)
    windows: list[WindowRecord] = list(run.windows)
    for batch in run.batches:
        if batch.phase != "timed":
            continue
        number = batch.batch + 10_000
        batches.append(replace(batch, phase="counters", batch=number))
        generated = 0
        for window in run.windows:
            if (window.batch, window.block) != (batch.batch, batch.block):
                continue
            if (window.nwor_mode, window.scv_mode) != (batch.nwor_mode, batch.scv_mode):
                continue
            if window.arm != batch.arm:
                continue
            less = SAVED if window.nwor_mode == "stage" else 0
            windows.append(
                replace(
                    window,
                    batch=number,
                    dram_read_bytes=round(9e9 + 1e6 * generated + less / 2),
                    dram_write_bytes=round(WRITTEN + 1e5 * generated - less + rng.gauss(0, noise)),
                )
            )
            generated += accepted(window) + window.num_reqs
    return replace(run, batches=tuple(batches), windows=tuple(windows))


def test_a_planted_difference_is_found_within_its_interval() -> None:
    cells = {cell.cell.label: cell for cell in cell_bytes(counted_run())}
    assert len(cells) == 7
    stage = cells["stage x graph"].differences["dram_write_bytes"]
    assert stage.holds(-SAVED)
    assert not stage.holds(0.0)
    assert abs(stage.value + SAVED) < 20_000
    again = cells["off x off (A/A)"].differences["dram_write_bytes"]
    assert again.holds(0.0)
    assert cells["stage x off"].differences["dram_read_bytes"].value == pytest.approx(
        SAVED / 2, abs=1
    )
    assert cells["off x off"].differences == {}


def test_a_difference_below_the_noise_is_not_called() -> None:
    cells = cell_bytes(counted_run(noise=6e6))
    stage = next(c for c in cells if c.cell.label == "stage x graph")
    assert stage.differences["dram_write_bytes"].holds(0.0)
    assert (stage.smallest("dram_write_bytes") or 0) > SAVED


def test_first_windows_and_smaller_ones_are_left_out() -> None:
    run = counted_run(blocks=3)
    before = cell_bytes(run)[0]
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
    cells = {c.cell.label: c for c in cell_bytes(replace(run, windows=moved))}
    assert cells["stage x graph"].matched < cells["off x graph"].matched
    found = cells["stage x graph"].differences["dram_write_bytes"]
    assert abs(found.value + SAVED) < 40_000


def test_batches_too_short_to_count_show_no_number_and_say_what_to_do() -> None:
    """Every window stands among the first of its batch."""
    run = counted_run(blocks=3)
    short = tuple(w for w in run.windows if w.dram_write_bytes is None or w.window < SETTLING)
    run = replace(run, windows=short)
    assert {(cell.staged, cell.accepted) for cell in cell_bytes(run)} == {(None, None)}
    for cell in cell_bytes(run):
        assert cell.windows == cell.blocks == cell.matched == 0
        assert cell.amounts == cell.differences == cell.predicted == {}
    section = traffic_section(analysed(run))
    text = render_markdown(Document("x", (), (section,)))
    assert "stage x graph: no window counts" in text
    assert "write a larger --max-new-tokens" in text
    assert not re.search(r"\| +0\.0+ ", text)


def test_a_run_without_counters_has_no_section() -> None:
    run = make_run()
    assert cell_bytes(run) == []
    assert dram_summary(analysed(run).dram) is None


@examples(30)
@given(st.lists(st.floats(-1e9, 1e9), min_size=3, max_size=12))
def test_the_interval_is_students_at_least(values: list[float]) -> None:
    found = amount_of(values)
    error = reference.sem(values)
    low, high = found.value - found.low, found.high - found.value
    assert low == pytest.approx(high, rel=1e-6, abs=1e-3)
    if error > 1.0:
        plain = reference.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert found.high - found.low >= (plain[1] - plain[0]) * (1 - 1e-6)


def test_too_few_blocks_give_only_a_mean() -> None:
    found = amount_of([1.0, 3.0])
    assert (found.value, found.is_bounded) == (2.0, False)


@pytest.mark.parametrize(
    ("cache", "strategy", "read", "written"),
    [
        ("auto", BY_REFERENCE, 12_000, 12_000 - 32_000),
        ("bfloat16", COPY_SPILLED, 12_000, 32_000 + 12_000 - 32_000),
        ("fp8", BY_REFERENCE, 24_000, 12_000 - 32_000),  # 1,000 bytes are then one byte an element
    ],
)
def test_the_prediction_is_the_byte_models(cache, strategy, read, written) -> None:
    engine = ENGINE.model_copy(update={"kv_cache_dtype": cache})
    found = predicted_difference(engine, 32, 12, strategy)
    assert found == {"dram_read_bytes": read, "dram_write_bytes": written}


def test_held_by_reference_the_certain_first_tokens_are_read_back_too() -> None:
    engine = ENGINE.model_copy(update={"kv_cache_dtype": "fp8"})  # held at twice the cache's size
    for strategy, more in ((BY_REFERENCE, 8 * 2_000), (COPY_SPILLED, 0)):
        without = predicted_difference(engine, 32, 12, strategy)
        found = predicted_difference(engine, 32, 12, strategy, requests=8)
        assert found["dram_read_bytes"] - without["dram_read_bytes"] == more
        assert found["dram_write_bytes"] == without["dram_write_bytes"]


def test_staged_states_are_written_once_and_read_again() -> None:
    """8 requests with 4 drafts, of which 12 are accepted; a state has 1,000 bytes, a record 10."""
    facts = {"bytes_per_token": 512, "dtype": "bfloat16"}
    plain = predicted_difference(EngineStatus(**facts), 32, 12, requests=8)
    staged = EngineStatus(**facts, state_bytes=1000, state_record_token_bytes=10)
    found = predicted_difference(staged, 32, 12, requests=8)
    # Read: 8 states again, and the records of 8 first tokens and 12 drafts. Written: 40 records,
    # and 8 states instead of 40.
    assert found["dram_read_bytes"] - plain["dram_read_bytes"] == 8 * 1000 + 20 * 10
    assert found["dram_write_bytes"] - plain["dram_write_bytes"] == 40 * 10 - 32 * 1000


def test_without_the_engines_sizes_nothing_is_predicted() -> None:
    assert predicted_difference(EngineStatus(dtype="bfloat16"), 32, 12) == {}
    assert predicted_difference(EngineStatus(bytes_per_token=10, dtype="odd"), 32, 12) == {}


def test_the_section_says_what_was_saved_and_how_it_is_known() -> None:
    run = counted_run()
    run = with_header(run, "engine", dtype="float32")
    section = traffic_section(analysed(run))
    text = render_markdown(Document("x", (), (section,)))
    assert "stage x graph wrote 1.8" in text
    assert "MB a window fewer than off x off" in text
    cell = next(each for each in cell_bytes(run) if each.cell.nwor_mode == "stage")
    wanted = (cell.accepted - cell.staged) * BYTES_PER_TOKEN
    assert cell.predicted["dram_write_bytes"] == pytest.approx(wanted)
