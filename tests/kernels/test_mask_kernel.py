"""Acceptance mask: against a loop over what rejection sampling returned."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference

VOCAB = 10


def looped_mask(
    sampled: list[list[int]], drafts: list[int], vocab_size: int, capacity: int
) -> tuple[list[bool], list[int]]:
    mask, counts = [], []
    for ids, num_drafts in zip(sampled, drafts, strict=True):
        valid = 0
        for token in ids:
            if 0 <= token < vocab_size:
                valid += 1
        kept = valid - 1 if valid > 0 else 0
        kept = kept if kept < num_drafts else num_drafts
        counts.append(kept)
        for draft in range(num_drafts):
            mask.append(draft < kept)
    return mask + [False] * (capacity - len(mask)), counts


def test_strided_counts_and_outputs():
    sampled = torch.tensor([3, 99, 1, 99])[::2]
    drafts = torch.tensor([2, 99, 2, 99], dtype=torch.int32)[::2]
    mask_memory = torch.ones(12, dtype=torch.bool)
    count_memory = torch.full((4,), -7, dtype=torch.int32)
    acceptance_mask_from_counts_reference(sampled, drafts, mask_memory[::2], count_memory[1::2])
    assert mask_memory[::2].tolist() == [True, True, False, False, False, False]
    assert mask_memory[1::2].all()
    assert count_memory.tolist() == [-7, 2, -7, 0]


@examples(100)
@given(
    requests=st.integers(0, 5),
    drafts=st.integers(0, 4),
    spare=st.integers(0, 3),
    uniform=st.booleans(),
    data=st.data(),
)
def test_counts_give_what_the_loop_over_as_many_ids_gives(requests, drafts, spare, uniform, data):
    sampled = data.draw(st.lists(st.integers(-1, 7), min_size=requests, max_size=requests))
    ids = [[3] * max(count, 0) for count in sampled]
    capacity = requests * drafts + spare
    accepted = torch.full((capacity,), True)
    num_accepted = torch.full((requests,), -7, dtype=torch.int32)
    acceptance_mask_from_counts_reference(
        torch.tensor(sampled, dtype=torch.int32),
        None if uniform else torch.full((requests,), drafts, dtype=torch.int32),
        accepted,
        num_accepted,
        drafts if uniform else None,
    )
    expected = looped_mask(ids, [drafts] * requests, VOCAB, capacity)
    assert (accepted.tolist(), num_accepted.tolist()) == expected


def test_the_drafts_are_given_in_exactly_one_way():
    ones, mask = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
    for counts, uniform in ((None, None), (ones, 1)):
        with pytest.raises(ValueError, match="drafts_per_request"):
            acceptance_mask_from_counts_reference(ones, counts, mask, ones.clone(), uniform)
