"""Windows counted after the fact, and those of finished requests counted apart."""

import numpy as np
import torch

from nwor_bench.plugin.accumulator import Accumulator
from nwor_bench.plugin.late_counts import MOST_PENDING, LateCounts, PendingStep, outer_name

LAYERS = 3


def step(req_ids, num_sampled, drafts=None, **values):
    return PendingStep(
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
    assert window["num_reqs"] == 2
    assert (window["draft_tokens"], window["accepted_tokens"]) == (8, 4)
    assert (window["committed_tokens"], window["rejected_tokens"]) == (4, 4)
    assert window["stage_operations"] == 8 * LAYERS
    assert window["accepted_per_position"] == (1, 1, 1, 1)
    assert window["drafts_per_position"] == (2, 2, 2, 2)
    assert window["uncounted_draft_tokens"] == 0


def test_a_window_written_directly_stages_and_commits_nothing():
    (window,) = resolved([step(["a-1"], [3], [4], fallback_reason="why")])
    counted = ("staged_tokens", "committed_tokens", "rejected_tokens", "stage_operations")
    assert [window[name] for name in counted] == [0, 0, 0, 0]
    assert (window["accepted_tokens"], window["fallback_reason"]) == (2, "why")


def test_prefill_only_requests_accept_nothing_and_acceptance_never_exceeds_drafts():
    (window,) = resolved([step(["a-1", "b-1", "c-1"], [0, 3, 9], [0, 2, 4])])
    assert window["accepted_tokens"] == 0 + 2 + 4
    assert window["num_reqs"] == 2


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
    assert [w["uncounted_draft_tokens"] for w in windows] == [0, 0, 4]
    assert [w["uncounted_accepted_tokens"] for w in windows] == [0, 0, 3]
    assert windows[2]["accepted_per_position"] == (1, 0, 0, 0)  # b's alone
    assert windows[2]["accepted_tokens"] == 1 + 3


def test_a_window_that_begins_at_the_last_token_still_counts():
    windows = resolved([step(["a-x"], [1]), step(["a-x"], [1], [4])], {"a": 2})
    assert windows[0]["uncounted_draft_tokens"] == 0


def test_without_lengths_every_window_counts():
    windows = resolved([step(["a-x"], [5], [4]), step(["a-x"], [5], [4])])
    assert sum(w["uncounted_draft_tokens"] for w in windows) == 0


def test_invalid_drafts_are_not_vllms():
    (window,) = resolved([step(["a-x"], [1], [4], invalid_drafts={"a-x": 3})])
    assert window["uncounted_draft_tokens"] == 3


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
    return [window["wall_ms"] for window in windows]


def alone():
    return step(["a-x"], [1], [2], num_tokens=3)


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


def test_nobody_draining_does_not_pile_up_device_memory():
    accumulator = Accumulator()
    late = LateCounts(accumulator, LAYERS)
    for _ in range(MOST_PENDING + 1):
        late.add(step(["a-x"], [1], [4]))
    assert len(accumulator.windows) == MOST_PENDING + 1


def test_a_request_is_known_by_the_name_its_caller_gave():
    assert outer_name("17-0a1b2c3d") == "17"
    assert outer_name("chat-cmpl-5-0a1b2c3d") == "chat-cmpl-5"
    assert outer_name("17") == "17"
