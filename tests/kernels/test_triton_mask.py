"""Acceptance mask in Triton against the torch reference: interpreted, or on a GPU."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, generator

pytest.importorskip("triton")

from nwor_kernels.mask.kernel import acceptance_mask_from_counts_triton
from nwor_kernels.mask.reference import acceptance_mask_from_counts_reference


def outputs(capacity: int, requests: int, device, *, junk: bool = True):
    """Outputs full of junk, with gaps that must keep it: (mask memory, mask, memory, counts)."""
    mask = torch.full((2 * capacity + 20,), junk, dtype=torch.bool, device=device)
    counts = torch.full((2 * requests + 1,), -7, dtype=torch.int32, device=device)
    return mask, mask[: 2 * capacity : 2], counts, counts[1::2]


def compare(sampled, drafts, capacity, device, *, junk=True):
    """Both implementations on outputs full of junk; all memory around them compared too.

    `drafts` is a list with the drafts of each request, or one number for all of them.
    """
    results = []
    uniform = drafts if isinstance(drafts, int) else None
    for on, fill in (
        ("cpu", acceptance_mask_from_counts_reference),
        (device, acceptance_mask_from_counts_triton),
    ):
        memory, mask, count_memory, num_accepted = outputs(capacity, len(sampled), on, junk=junk)
        counts = None
        if uniform is None:
            counts = torch.tensor(drafts, dtype=torch.int32, device=on)
        fill(torch.as_tensor(sampled).int().to(on), counts, mask, num_accepted, uniform)
        results.append((memory.tolist(), count_memory.tolist()))
    assert results[1] == results[0]


@examples(40)
@given(
    seed=SEEDS,
    drafts=st.lists(st.integers(0, 5), max_size=6),
    uniform=st.none() | st.integers(0, 5),
    most=st.integers(0, 7),
    spare=st.integers(-3, 40),
    junk=st.booleans(),
)
def test_any_window_is_masked_as_by_the_reference(
    triton_device, seed, drafts, uniform, most, spare, junk
):
    total = sum(drafts) if uniform is None else len(drafts) * uniform
    sampled = torch.randint(-1, most + 1, (len(drafts),), generator=generator(seed))
    drafts = drafts if uniform is None else uniform
    compare(sampled, drafts, max(total + spare, 0), triton_device, junk=junk)


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
def test_large_windows(triton_device, requests, width, spare):
    rng = generator(requests + width)
    drafts = torch.randint(0, width, (requests,), generator=rng).tolist()
    sampled = torch.randint(0, width + 1, (requests,), generator=rng)
    compare(sampled, drafts, sum(drafts) + spare, triton_device)
    uniform = width - 1
    compare(sampled, uniform, requests * uniform + spare, triton_device)


@pytest.mark.parametrize("junk", [True, False])
@pytest.mark.parametrize("drafts", [[3, 3], 3])
def test_a_mask_too_short_is_filled_and_nothing_behind_it(triton_device, junk, drafts):
    for capacity in (0, 2, 4, 5):
        compare([4, 3], drafts, capacity, triton_device, junk=junk)


@pytest.mark.parametrize("drafts", [None, 4])
def test_a_count_from_nowhere_accepts_no_more_than_the_drafts(triton_device, drafts):
    counts = torch.tensor([5, 9, 0, -3, 1, 2], dtype=torch.int32, device=triton_device)
    on_device = torch.full((6,), 4, dtype=torch.int32, device=triton_device)
    _, mask, _, num_accepted = outputs(26, 6, triton_device)
    acceptance_mask_from_counts_triton(
        counts, None if drafts else on_device, mask, num_accepted, drafts
    )
    assert num_accepted.tolist() == [4, 4, 0, 0, 0, 1]
    assert mask.tolist() == [True] * 8 + [False] * 12 + [True] + [False] * 5


def test_the_drafts_are_given_in_exactly_one_way(triton_device):
    ones = torch.ones(2, dtype=torch.int32, device=triton_device)
    mask = torch.zeros(2, dtype=torch.bool, device=triton_device)
    for drafts, uniform in ((None, None), (ones, 1)):
        with pytest.raises(ValueError, match="drafts_per_request"):
            acceptance_mask_from_counts_triton(ones, drafts, mask, ones, uniform)


def test_more_drafts_than_a_program_writes_at_once(triton_device):
    compare([50, 1, 2], [70, 33, 1], 110, triton_device)
    compare([90], [100], 101, triton_device)


def test_strided_counts_are_followed(triton_device):
    sampled = torch.tensor([3, 99, 1, 99], dtype=torch.int32, device=triton_device)[::2]
    drafts = torch.tensor([2, 99, 2, 99], dtype=torch.int32, device=triton_device)[::2]
    _, mask, _, counts = outputs(5, 2, triton_device)
    acceptance_mask_from_counts_triton(sampled, drafts, mask, counts)
    assert mask.tolist() == [True, True, False, False, False]
    assert counts.tolist() == [2, 0]
