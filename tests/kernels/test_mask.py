"""Acceptance mask, by reference and in Triton: against a loop over the sampled ids."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, generator

pytest.importorskip("triton")

from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference


def looped(sampled: list[int], drafts: list[int], capacity: int) -> tuple[list[bool], list[int]]:
    """(mask, counts): m sampled ids are m - 1 accepted drafts and one token more."""
    mask, counts = [], []
    for ids, num_drafts in zip(sampled, drafts, strict=True):
        counts.append(min(max(ids - 1, 0), num_drafts))
        mask += [draft < counts[-1] for draft in range(num_drafts)]
    return (mask + [False] * capacity)[:capacity], counts


def check(on_triton, sampled, drafts, capacity, *, junk=True, step=1):
    """Fill outputs full of junk, with gaps that must keep it; inputs lie `step` apart.

    `drafts` is a list with the drafts of each request, or one number for all of them.
    """
    fill = (
        acceptance_mask_from_counts_triton if on_triton else acceptance_mask_from_counts_reference
    )
    device, requests = on_triton or torch.device("cpu"), len(sampled)

    def apart(numbers: list[int]) -> torch.Tensor:
        with_junk = [each for number in numbers for each in (number, 99)[:step]]
        return torch.tensor(with_junk, dtype=torch.int32, device=device)[::step]

    mask = torch.full((2 * capacity + 20,), junk, dtype=torch.bool, device=device)
    counts = torch.full((2 * requests + 1,), -7, dtype=torch.int32, device=device)
    outputs = mask[: 2 * capacity : 2], counts[1::2]
    if isinstance(drafts, int):
        fill(apart(sampled), None, *outputs, drafts)
        drafts = [drafts] * requests
    else:
        fill(apart(sampled), apart(drafts), *outputs)
    wanted_mask, wanted_counts = looped(sampled, drafts, capacity)
    wanted = [junk] * len(mask), [-7] * len(counts)
    wanted[0][: 2 * capacity : 2], wanted[1][1::2] = wanted_mask, wanted_counts
    assert (mask.tolist(), counts.tolist()) == wanted


@examples(40)
@given(
    seed=SEEDS,
    drafts=st.lists(st.integers(0, 5), max_size=6),
    uniform=st.none() | st.integers(0, 5),
    most=st.integers(0, 7),
    spare=st.integers(-3, 40),
    junk=st.booleans(),
    step=st.integers(1, 2),
)
def test_any_window(on_triton, seed, drafts, uniform, most, spare, junk, step):
    total = sum(drafts) if uniform is None else len(drafts) * uniform
    sampled = torch.randint(-1, most + 1, (len(drafts),), generator=generator(seed)).tolist()
    drafts = drafts if uniform is None else uniform
    check(on_triton, sampled, drafts, max(total + spare, 0), junk=junk, step=step)


@pytest.mark.parametrize(
    ("requests", "width", "spare"),
    [
        pytest.param(512, 5, 0, marks=pytest.mark.gpu),  # the interpreter would take seconds
        pytest.param(600, 2, 90, marks=pytest.mark.gpu),
        (130, 2, 40),
        (3, 33, 7),
        (1, 33, 500),
    ],
)
def test_large_windows(on_triton, requests, width, spare):
    rng = generator(requests + width)
    drafts = torch.randint(0, width, (requests,), generator=rng).tolist()
    sampled = torch.randint(0, width + 1, (requests,), generator=rng).tolist()
    check(on_triton, sampled, drafts, sum(drafts) + spare)
    check(on_triton, sampled, width - 1, requests * (width - 1) + spare)


@pytest.mark.parametrize(
    ("sampled", "drafts", "capacity"),
    [
        *(([4, 3], drafts, short) for drafts in ([3, 3], 3) for short in (0, 2, 4, 5)),
        *(([5, 9, 0, -3, 1, 2], drafts, 26) for drafts in ([4] * 6, 4)),  # counts from nowhere
        ([50, 1, 2], [70, 33, 1], 110),  # more drafts than a program writes at once
        ([90], [100], 101),
    ],
)
@pytest.mark.parametrize("junk", [True, False])
def test_counts_and_masks_that_do_not_fit(on_triton, sampled, drafts, capacity, junk):
    check(on_triton, sampled, drafts, capacity, junk=junk)


def test_the_drafts_are_given_in_exactly_one_way(on_triton):
    fill = (
        acceptance_mask_from_counts_triton if on_triton else acceptance_mask_from_counts_reference
    )
    ones, mask = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)
    for drafts, uniform in ((None, None), (ones, 1)):
        with pytest.raises(ValueError, match="drafts_per_request"):
            fill(ones, drafts, mask, ones.clone(), uniform)
