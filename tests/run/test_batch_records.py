"""From raw output to records: nothing is lost, nothing unknown becomes a number."""

from dataclasses import fields, replace
from typing import Any

import pytest
from fake_engine import BYTES_PER_TOKEN, FakeEngine

from nwor_bench.engine.protocol import BatchOutput, Sampling
from nwor_bench.engine.readings import VllmCounters
from nwor_bench.records.cell import AA, Cell, Drafts, NworMode, ScvMode
from nwor_bench.records.types import Phase, WindowRecord
from nwor_bench.records.window_order import WindowOrder, compared_pairs
from nwor_bench.run.batch import BatchPlace, batch_record, window_records
from nwor_bench.workload.schedule import Block

SET_BY_THE_RUN = {
    *("pair", "nwor_mode", "scv_mode", "block", "batch", "window", "cell_number"),
    *("bytes_staged", "bytes_committed", "bytes_avoided"),
}

MEASURED = {field.name for field in fields(WindowRecord)} - SET_BY_THE_RUN

STAGE = Cell("toy", NworMode.STAGE, ScvMode.GRAPH)

PLACE = BatchPlace(STAGE, "timed", Block(4, (STAGE,), ()), batch=11, order=2, started_at="then")

PROMPTS = [[5, 6, 7], [8, 9]]

SAMPLING = Sampling(max_new_tokens=6, temperature=0.5, top_p=0.9, seed=12, ignore_eos=True)


@pytest.fixture
def output() -> BatchOutput:
    engine = FakeEngine()
    engine.set_modes(STAGE)
    return engine.generate(PROMPTS, SAMPLING)


def with_window(output: BatchOutput, **changes: Any) -> BatchOutput:
    first, *rest = output.windows
    return replace(output, windows=[replace(first, **changes), *rest])


def test_a_window_carries_its_place_and_all_its_counts(output: BatchOutput) -> None:
    records = window_records(PLACE, output, BYTES_PER_TOKEN)
    assert [record.window for record in records] == [0, 1, 2]
    for record, window in zip(records, output.windows, strict=True):
        place = (record.pair, record.nwor_mode, record.scv_mode, record.block, record.batch)
        assert place == ("toy", "stage", "graph", 4, 11)
        assert record.staged_tokens == record.committed_tokens + record.rejected_tokens > 0
        for name in MEASURED:
            assert getattr(record, name) == getattr(window, name)


def test_bytes_are_tokens_times_bytes_a_token(output: BatchOutput) -> None:
    counts = {"staged_tokens": 8, "committed_tokens": 3, "rejected_tokens": 5}
    record = window_records(PLACE, with_window(output, **counts), 1536)[0]
    assert (record.bytes_staged, record.bytes_committed, record.bytes_avoided) == (
        12_288,
        4_608,
        7_680,
    )


def test_unknown_stays_unknown(output: BatchOutput) -> None:
    record = window_records(PLACE, with_window(output, wall_ms=None), None)[0]
    assert record.bytes_staged is record.bytes_committed is record.bytes_avoided is None
    assert record.wall_ms is record.mask_ms is None


def test_a_batch_sums_its_windows(output: BatchOutput) -> None:
    record = batch_record(PLACE, output, PROMPTS, SAMPLING, {"cpu_other": 0.25})
    for name in ("draft_tokens", "accepted_tokens", "staged_tokens", "committed_tokens"):
        assert getattr(record, name) == sum(getattr(window, name) for window in output.windows)
    assert (record.windows, record.requests, record.prompt_tokens) == (3, 2, 5)
    assert (record.phase, record.block, record.batch, record.order) == ("timed", 4, 11, 2)
    assert (record.temperature, record.seed, record.started_at) == (0.5, 12, "then")
    assert record.scv_counters == output.scv_counters
    assert record.parity is None


def test_throughput_is_output_tokens_over_latency(output: BatchOutput) -> None:
    slow = replace(output, token_ids=((1, 2, 3), (4,)), latency_ms=500.0)
    record = batch_record(PLACE, slow, PROMPTS, SAMPLING, {"cpu_other": 0.25})
    assert (record.output_tokens, record.tokens_per_s) == (4, 8.0)


def test_a_request_has_its_tokens_and_the_drafts_that_it_got(output: BatchOutput) -> None:
    own = replace(
        output, token_ids=((1, 2, 3), (4,)), request_acceptance=((2, 3, 1), (0, 0, 0))
    )  # fmt: skip
    record = batch_record(PLACE, own, PROMPTS, SAMPLING, {})
    assert record.request_acceptance == ((2, 3), (0, 0))
    assert record.request_tokens == ((3, 1), (1, 0))


def test_vllms_counters_stand_beside_ours(output: BatchOutput) -> None:
    counters = VllmCounters(2, 9, 7, (4, 3))
    record = batch_record(
        PLACE, replace(output, counters=counters), PROMPTS, SAMPLING, {"cpu_other": 0.25}
    )
    found = (record.vllm_num_drafts, record.vllm_draft_tokens, record.vllm_accepted_tokens)
    assert found == (2, 9, 7)
    assert record.vllm_accepted_per_position == (4, 3)
    assert record.draft_tokens != 9


def test_fallbacks_are_counted_by_reason(output: BatchOutput) -> None:
    reasons = ["mixed_batch", None, "mixed_batch"]
    windows = [replace(w, fallback_reason=r) for w, r in zip(output.windows, reasons, strict=True)]
    record = batch_record(
        PLACE, replace(output, windows=windows), PROMPTS, SAMPLING, {"cpu_other": 0.25}
    )
    assert record.fallbacks == {"mixed_batch": 2}


def test_digests_identify_prompts_and_answers(output: BatchOutput) -> None:
    def prompt_digest(prompts: list[list[int]]) -> str:
        return batch_record(PLACE, output, prompts, SAMPLING, {}).prompt_digest

    assert prompt_digest([[1, 2], [3]]) != prompt_digest([[1], [2, 3]])
    assert prompt_digest(PROMPTS) == prompt_digest([list(p) for p in PROMPTS])
    same = replace(output, token_ids=((1, 2), (1, 2), (2, 1)))
    one, two, three = batch_record(PLACE, same, PROMPTS, SAMPLING, {}).token_digests
    assert one == two != three


@pytest.mark.parametrize("before", [VllmCounters(), VllmCounters(1, 4, 2, (1, 1, 0, 0))])
def test_counters_are_differences(before: VllmCounters) -> None:
    after = VllmCounters(5, 20, 9, (4, 3, 1, 1))
    earlier = before.accepted_per_position or (0, 0, 0, 0)
    assert after.minus(before) == VllmCounters(
        5 - before.num_drafts,
        20 - before.draft_tokens,
        9 - before.accepted_tokens,
        (4 - earlier[0], 3 - earlier[1], 1 - earlier[2], 1 - earlier[3]),
    )


CELLS = tuple(Cell("tiny", NworMode.OFF, ScvMode.OFF, arm) for arm in (Drafts(0), Drafts(2), AA))

ORDER = WindowOrder(CELLS, compared_pairs(CELLS), "0")

BETWEEN = BatchPlace(CELLS[0], Phase.INTERLEAVED, Block(1, (), ()), 7, 0, "", ORDER)


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
    assert BETWEEN.cell_of(window(cell, drafts)).arm == arm


def test_a_window_between_groups_is_of_mode_off() -> None:
    """There the hook's mode is off, whatever the group before it staged."""
    staged = replace(CELLS[1], nwor_mode=NworMode.STAGE)
    cells = (*CELLS[:2], staged, CELLS[2])
    place = replace(BETWEEN, window_order=WindowOrder(cells, compared_pairs(cells), "0"))
    assert place.cell_of(window(None, 6)) == CELLS[1]
    assert place.cell_of(window(2, 6)) == staged
