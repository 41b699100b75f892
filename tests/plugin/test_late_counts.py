"""Windows counted after the fact and kept until a drain; those of finished requests separately."""

from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin import late_counts
from nwor_bench.plugin import step as of_step
from nwor_bench.plugin.late_counts import MAX_PENDING, LateCounts
from nwor_bench.plugin.step import Accumulator, Step, per_position

LAYERS = 3


def step(req_ids, num_sampled, drafts=None, **values):
    return Step(
        started=0.0,
        req_ids=req_ids,
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32),
        drafts=None if drafts is None else np.array(drafts, dtype=np.int32),
        **values,
    )


def resolved(steps, lengths=None):
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    for one in steps:
        late.add(one)
    late.resolve(lengths)
    return accumulator.drain()


def test_a_staged_window_is_settled_from_the_devices_counts():
    (window,) = resolved([step(["a-1", "b-1"], [5, 1], [4, 4], staged_tokens=8)])
    assert window.num_reqs == 2
    assert (window.draft_tokens, window.accepted_tokens) == (8, 4)
    assert (window.committed_tokens, window.rejected_tokens) == (4, 4)
    assert window.stage_operations == 8 * LAYERS
    assert window.accepted_per_position == (1, 1, 1, 1)
    assert window.drafts_per_position == (2, 2, 2, 2)
    assert window.uncounted_draft_tokens == 0


def test_prefill_only_requests_accept_nothing_and_acceptance_never_exceeds_drafts():
    (window,) = resolved([step(["a-1", "b-1", "c-1"], [0, 3, 9], [0, 2, 4])])
    assert window.accepted_tokens == 0 + 2 + 4
    assert window.num_reqs == 2


def test_windows_of_finished_requests_are_counted_apart():
    # Request a: prefill gives 1 token, two windows give 3 and 2: 6 tokens, of which it returned
    # 5 (cut by its limit). The third window ran although a had finished. b goes on.
    steps = [
        step(["a-x", "b-y"], [1, 1]),
        step(["a-x", "b-y"], [3, 2], [4, 4]),
        step(["a-x", "b-y"], [2, 5], [4, 4]),
        step(["b-y", "a-x"], [2, 4], [4, 4]),
    ]
    windows = resolved(steps, {"a": 5, "b": 100})
    assert [w.uncounted_draft_tokens for w in windows] == [0, 0, 4]
    assert [w.uncounted_accepted_tokens for w in windows] == [0, 0, 3]
    assert windows[2].accepted_per_position == (1, 0, 0, 0)  # only b's
    assert windows[2].accepted_tokens == 1 + 3


def test_drafts_behind_a_requests_last_token_are_nobodys():
    """a returned 5 tokens: 1, 3, and 1 of the 2 of its last window; nobody got that draft. Then it
    had finished: what it accepts is counted apart. c stopped with the first token of a window."""
    steps = [
        step(["a-x", "b-y", "c-z"], [1, 1, 1]),
        step(["a-x", "b-y", "c-z"], [3, 2, 5], [4, 4, 4]),
        step(["a-x", "b-y"], [2, 5], [4, 4]),
        step(["b-y", "a-x"], [2, 4], [4, 4]),
    ]
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    for one in steps:
        late.add(one)
    late.resolve({"a": 5, "b": 100, "c": 2})
    assert [w.undelivered_tokens for w in accumulator.drain()] == [4, 1, 0]
    assert late.by_request == {"a": [2, 3, 2], "b": [3, 6, 6], "c": [1, 4, 0]}


def test_in_a_server_the_scheduler_says_what_nobody_got():
    windows = []
    accumulator = Accumulator(listeners=[lambda window, place: windows.append(window)])
    late = LateCounts(accumulator, LAYERS)
    late.in_server = True
    late.add(step(["a-x"], [3], [4], undelivered=2))
    late.add(step(["a-x"], [3], [4]))
    late.resolve(None)
    assert [window.undelivered_tokens for window in windows] == [2, None]


def walls(*steps):
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    for place, one in enumerate(steps):
        one.started = 10.0 + place / 4
        late.step_started(one.started)
        late.add(one)
    late.resolve({})
    windows = accumulator.drain()
    late.step_started(99.0)  # the next batch is no part of it
    assert accumulator.drain() == []
    return [window.wall_ms for window in windows]


def alone():
    return step(["a-x"], [1], [2], num_tokens=3, only_verifies=True)


def test_a_window_lasts_until_the_next_step_begins():
    # Two windows must come before one that is timed, and nobody saw the end of the last.
    assert walls(alone(), alone(), alone(), alone()) == [None, None, 250.0, None]


def test_the_windows_behind_a_prefill_have_no_time_of_their_own():
    prefill = step(["a-x"], [1], num_tokens=30)
    beside_prefill = step(["a-x", "b-y"], [1, 0], [2, 0], num_tokens=20)
    before, timed = [None, None], [250.0]
    windows = [alone() for _ in range(7)]
    assert walls(*windows[:3], prefill, *windows[3:]) == [*before, *timed, *before, *timed, None]
    # Beside a prefill a window lasts as long as that; those behind it are not timed either.
    windows = [alone() for _ in range(5)]
    assert walls(*windows[:2], beside_prefill, *windows[2:]) == [*before, *timed, *before, None]


BATCH = 5_000
"""Steps of a long batch, more than twice what may wait on the device."""


@pytest.mark.slow
def test_a_long_batch_is_counted_exactly_with_few_tensors_on_the_device():
    """b ends after 10 tokens, with two windows past its end; a goes on to the last step."""
    steps = [step(["a-x", "b-y"], [1, 2], [4, 4]) for _ in range(7)]
    steps += [step(["a-x"], [1], [4]) for _ in range(BATCH - len(steps))]
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    alive = [ref(one.num_sampled) for one in steps]
    for number in range(BATCH):
        late.add(steps[number])
        steps[number] = None
    assert sum(tensor() is not None for tensor in alive) <= MAX_PENDING
    late.resolve({"a": BATCH, "b": 10})
    windows = accumulator.drain()
    assert len(windows) == BATCH
    assert [w.uncounted_draft_tokens for w in windows[:7]] == [0] * 5 + [4, 4]
    assert [w.uncounted_accepted_tokens for w in windows[:7]] == [0] * 5 + [1, 1]
    assert sum(w.uncounted_draft_tokens for w in windows) == 8


def test_a_request_that_starts_again_has_what_the_scheduler_says():
    """Preempted with a step in flight whose tokens the scheduler dropped: 3 of 8 are left."""
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    late.add(step(["a-x"], [3], [4]))
    late.add(step(["a-x"], [5], [4]))  # dropped: they are sampled again
    late.note_requests(set(), {"a-x": 3})
    late.add(step(["a-x"], [1], [4]))
    late.add(step(["a-x"], [4], [4]))
    late.add(step(["a-x"], [1], [4]))  # past the end
    late.resolve({"a": 8})
    windows = accumulator.drain()
    assert [w.uncounted_draft_tokens for w in windows[2:]] == [0, 0, 4]


def test_only_the_last_windows_are_kept_if_nobody_drains(monkeypatch):
    monkeypatch.setattr(of_step, "MAX_UNDRAINED", 30)
    monkeypatch.setattr(late_counts, "MAX_PENDING", 10)
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    for _ in range(500):
        late.add(step(["a-x"], [1], [4]))
    late.resolve(None)
    assert len(accumulator.drain()) == 30
    # Now somebody drains: from here on nothing is left out.
    for _ in range(500):
        late.add(step(["b-x"], [1], [4]))
    late.resolve({"b": 400})
    windows = accumulator.drain()
    assert [w.uncounted_draft_tokens for w in windows] == [0] * 400 + [4] * 100


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
