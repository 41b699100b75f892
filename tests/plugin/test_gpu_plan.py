"""The V2 runner's input batch as a window: rows staged, whose they are, what is written."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from nwor_bench.plugin.gpu_plan import DraftCounts, drafts_only, whole_step

requests = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 5)).map(lambda n: (n[0], min(n[1], n[0] - 1))),
    min_size=1,
    max_size=6,
).filter(lambda batch: any(drafts for _, drafts in batch))
"""(rows of the step, how many of them are drafts) of each request."""


def plan(batch, copied):
    rows = np.array([n for n, _ in batch], dtype=np.int32)
    drafts = np.array([d for _, d in batch], dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    slots = torch.randperm(1000)[: int(rows.sum())]
    counts = DraftCounts(drafts, int(rows.sum()))
    return drafts_only(counts, starts, slots, copied=copied), starts, slots


@given(batch=requests, copied=st.booleans())
def test_every_draft_is_staged_once_and_nothing_else(batch, copied):
    window, starts, slots = plan(batch, copied)
    expected = [
        (request, index, int(starts[request + 1]) - drafts + index)
        for request, (_, drafts) in enumerate(batch)
        for index in range(drafts)
    ]
    found = zip(
        window.row_request.tolist(), window.row_index.tolist(), window.rows.tolist(), strict=True
    )
    assert list(found) == expected
    assert window.slots.tolist() == [int(slots[row]) for _, _, row in expected]
    staged = {row for _, _, row in expected}
    direct = [-1 if row in staged else int(slots[row]) for row in range(len(slots))]
    assert window.direct_slots.tolist() == direct
    assert window.total == len(expected)


@given(batch=requests)
def test_attention_finds_a_requests_staged_rows(batch):
    for copied in (False, True):
        window, _starts, _ = plan(batch, copied)
        places = list(range(window.total)) if copied else window.rows.tolist()
        for request, (_, drafts) in enumerate(batch):
            begin, end = int(window.staged_start[request]), int(window.staged_end[request])
            own = [p for p, r in zip(places, window.row_request.tolist(), strict=True)
                   if r == request]  # fmt: skip
            assert list(range(begin, end)) == own
            assert end - begin == drafts
    assert window.max_query_len == max(n for n, drafts in batch if drafts)


def test_the_plan_leaves_the_steps_own_slots_alone():
    window, _, slots = plan([(5, 4), (3, 0)], copied=False)
    before = slots.clone()
    window.direct_slots.fill_(-7)
    assert torch.equal(slots, before)


@pytest.mark.parametrize(
    ("drafts", "tokens", "length"),
    [
        ([4, 4, 4], 15, 5),
        ([1], 2, 2),
        ([4, 4, 3], 14, None),  # a shorter window
        ([4, 4, 4], 20, None),  # a prefill chunk of five more tokens somewhere
        ([0, 0], 2, None),  # no drafts at all
    ],
)
def test_a_step_is_uniform_only_if_it_is_nothing_but_equal_windows(drafts, tokens, length):
    assert DraftCounts(np.array(drafts, dtype=np.int32), tokens).uniform_length() == length


def test_a_whole_step_waits_for_the_commit_entirely():
    counts = DraftCounts(np.array([2, 2], dtype=np.int32), 6)
    slots = torch.tensor([7, 8, 9, 3, 4, 5])
    window = whole_step(counts, 3, torch.arange(6), slots)
    assert window.direct_slots is None
    assert window.staged_start is None
    assert (window.tokens_per_request, window.max_query_len, window.total) == (3, 3, 4)
    assert window.fits(torch.zeros(2, dtype=torch.int32))
    assert not window.fits(torch.zeros(1, dtype=torch.int32))
    assert not window.fits(torch.zeros(2, 3, dtype=torch.int32))
