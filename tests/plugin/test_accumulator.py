"""What a worker remembers: windows until they are drained, totals for good."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.counts import late_counts
from nwor_bench.plugin.counts.late_counts import Accumulator
from nwor_bench.plugin.counts.step import per_position
from nwor_bench.records.types import MeasuredWindow

COUNTS = st.builds(
    MeasuredWindow,
    num_reqs=st.integers(0, 9),
    draft_tokens=st.integers(0, 99),
    accepted_tokens=st.integers(0, 99),
    staged_tokens=st.integers(0, 99),
    committed_tokens=st.integers(0, 99),
    rejected_tokens=st.integers(0, 99),
    stage_operations=st.integers(0, 999),
    fallback_reason=st.sampled_from([None, "stage:overflow", "micro_batches"]),
)

TOTAL_OF_FIELD = {
    "draft_tokens": "draft_tokens",
    "accepted_tokens": "accepted_tokens",
    "nwor_total_staged": "staged_tokens",
    "nwor_total_committed": "committed_tokens",
    "nwor_total_rejected": "rejected_tokens",
    "nwor_stage_operations": "stage_operations",
}


def one_window(drafts: int = 1) -> MeasuredWindow:
    return MeasuredWindow(
        num_reqs=1,
        draft_tokens=drafts,
        staged_tokens=0,
        committed_tokens=0,
        rejected_tokens=0,
        stage_operations=0,
        fallback_reason=None,
    )


@given(windows=st.lists(COUNTS, max_size=8), drains=st.sets(st.integers(0, 7)))
def test_totals_add_up_whenever_the_windows_are_drained(windows, drains):
    kept, drained = Accumulator(), []
    for number, counts in enumerate(windows):
        kept.add(replace(counts, wall_ms=float(number)))
        if number in drains:
            drained += kept.drain()
    drained += kept.drain()

    assert [window["wall_ms"] for window in drained] == list(range(len(windows)))
    assert kept.totals["windows"] == len(windows)
    for total, field in TOTAL_OF_FIELD.items():
        assert kept.totals[total] == sum(getattr(counts, field) for counts in windows)
        assert kept.totals[total] == sum(window[field] for window in drained)
    reasons = Counter(c.fallback_reason for c in windows if c.fallback_reason)
    assert kept.fallbacks == reasons
    assert kept.totals["nwor_fallback_count"] == reasons.total()


def test_a_drain_hands_out_each_window_once():
    kept = Accumulator()
    kept.add(one_window(2))
    kept.add(one_window(3))
    assert [window["draft_tokens"] for window in kept.drain()] == [2, 3]
    assert kept.drain() == []
    kept.add(one_window(4))
    assert [window["draft_tokens"] for window in kept.drain()] == [4]


def test_a_window_becomes_a_plain_dict_where_unmeasured_times_are_none():
    kept = Accumulator()
    counts = replace(
        one_window(6),
        num_reqs=2,
        accepted_tokens=3,
        scv_path="device",
        accepted_per_position=(2, 1),
    )
    kept.add(replace(counts, wall_ms=1.5, mask_ms=0.25))
    (window,) = kept.drain()
    assert type(window) is dict
    assert (window["num_reqs"], window["draft_tokens"], window["accepted_tokens"]) == (2, 6, 3)
    assert (window["wall_ms"], window["mask_ms"]) == (1.5, 0.25)
    assert window["forward_ms"] is window["sample_ms"] is window["commit_ms"] is None
    assert window["accepted_per_position"] == (2, 1)
    assert window["scv_path"] == "device"
    assert window["fallback_reason"] is None


def test_no_time_is_zero_before_it_is_measured():
    times = {name: value for name, value in vars(one_window()).items() if name.endswith("_ms")}
    assert set(times.values()) == {None}


def test_undrained_windows_are_bounded_and_still_count(monkeypatch):
    monkeypatch.setattr(late_counts, "MAX_UNDRAINED", 3)
    kept = Accumulator()
    for drafts in range(1, 6):
        kept.add(one_window(drafts))
    assert kept.totals["windows"] == 5
    assert kept.totals["draft_tokens"] == 15
    assert [window["draft_tokens"] for window in kept.drain()] == [3, 4, 5]


def test_a_batch_keeps_every_window_once_somebody_drains(monkeypatch):
    monkeypatch.setattr(late_counts, "MAX_UNDRAINED", 3)
    kept = Accumulator()
    assert kept.drain() == []  # as a sweep does before its first batch
    for drafts in range(1, 6):
        kept.add(one_window(drafts))
    assert [window["draft_tokens"] for window in kept.drain()] == [1, 2, 3, 4, 5]


def test_the_bounds_as_shipped():
    kept = Accumulator()
    assert kept.most_kept == late_counts.MAX_UNDRAINED
    kept.drain()
    assert kept.most_kept == late_counts.MAX_BETWEEN_DRAINS


@given(
    requests=st.lists(
        st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=8
    )
)
def test_per_position_counts_requests(requests):
    drafts = tuple(n for n, _ in requests)
    kept = [m for _, m in requests]
    accepted_at, drafted_at = per_position(drafts, kept)
    assert sum(accepted_at) == sum(kept)
    assert sum(drafted_at) == sum(drafts)
    assert len(accepted_at) == len(drafted_at) == max(drafts, default=0)
    for j in range(len(drafted_at)):
        had_draft, kept_draft = 0, 0
        for n, m in requests:
            had_draft += j + 1 <= n
            kept_draft += j + 1 <= m
        assert (accepted_at[j], drafted_at[j]) == (kept_draft, had_draft)


@pytest.mark.parametrize(
    ("drafts", "kept", "accepted_at", "drafted_at"),
    [
        ((), [], (), ()),
        ((0, 0), [0, 0], (), ()),
        ((3, 1, 0), [2, 1, 0], (2, 1, 0), (2, 1, 1)),
    ],
)
def test_per_position_known(drafts, kept, accepted_at, drafted_at):
    assert per_position(drafts, kept) == (accepted_at, drafted_at)
