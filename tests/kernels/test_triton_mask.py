"""Acceptance mask in Triton against the torch reference: interpreted, or on a GPU."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_inputs import SEEDS, generator

pytest.importorskip("triton")

from nwor_kernels.mask.kernel import (
    acceptance_mask_from_counts_triton,
    acceptance_mask_triton,
)
from nwor_kernels.mask.reference import (
    acceptance_mask_from_counts_reference,
    acceptance_mask_reference,
)

VOCAB = 1000


def outputs(capacity: int, requests: int, device, *, junk: bool = True):
    """Outputs full of junk, with gaps that must keep it: (mask memory, mask, memory, counts)."""
    mask = torch.full((2 * capacity + 20,), junk, dtype=torch.bool, device=device)
    counts = torch.full((2 * requests + 1,), -7, dtype=torch.int32, device=device)
    return mask, mask[: 2 * capacity : 2], counts, counts[1::2]


def random_ids(requests: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Accepted ids, then padding; here and there an id that is no token of the vocabulary."""
    rng = generator(seed)
    ids = torch.randint(0, VOCAB + 20, (requests, width), generator=rng)
    valid = torch.randint(0, width + 1, (requests, 1), generator=rng)
    return ids.where(torch.arange(width) < valid, -1).to(dtype)


def compare(ids, drafts, capacity, device, *, junk=True, from_counts=False):
    """Both implementations on outputs full of junk; all memory around them compared too.

    `drafts` is a list with the drafts of each request, or one number for all of them.
    """
    results = []
    counts = None if isinstance(drafts, int) else torch.tensor(drafts, dtype=torch.int32)
    uniform = drafts if isinstance(drafts, int) else None
    for on, by_ids, by_counts in (
        ("cpu", acceptance_mask_reference, acceptance_mask_from_counts_reference),
        (device, acceptance_mask_triton, acceptance_mask_from_counts_triton),
    ):
        memory, mask, count_memory, num_accepted = outputs(capacity, len(ids), on, junk=junk)
        drafts_there = None if counts is None else counts.to(on)
        if from_counts:
            valid = ((ids >= 0) & (ids < VOCAB)).sum(dim=1, dtype=torch.int32).to(on)
            by_counts(valid, drafts_there, mask, num_accepted, uniform)
        else:
            by_ids(ids.to(on), drafts_there, VOCAB, mask, num_accepted, uniform)
        results.append((memory.tolist(), count_memory.tolist()))
    assert results[1] == results[0]


@examples(40)
@given(
    seed=SEEDS,
    drafts=st.lists(st.integers(0, 5), max_size=6),
    uniform=st.none() | st.integers(0, 5),
    width=st.integers(0, 7),
    spare=st.integers(-3, 40),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    junk=st.booleans(),
    from_counts=st.booleans(),
)
def test_any_window_is_masked_as_by_the_reference(
    triton_device, seed, drafts, uniform, width, spare, dtype, junk, from_counts
):
    total = sum(drafts) if uniform is None else len(drafts) * uniform
    ids = random_ids(len(drafts), width, seed, dtype)
    compare(
        ids,
        drafts if uniform is None else uniform,
        max(total + spare, 0),
        triton_device,
        junk=junk,
        from_counts=from_counts,
    )


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
@pytest.mark.parametrize("from_counts", [True, False])
def test_large_windows(triton_device, requests, width, spare, from_counts):
    rng = generator(requests + width)
    drafts = torch.randint(0, width, (requests,), generator=rng).tolist()
    ids = random_ids(requests, width, requests, torch.int64)
    compare(ids, drafts, sum(drafts) + spare, triton_device, from_counts=from_counts)
    uniform = width - 1
    compare(ids, uniform, requests * uniform + spare, triton_device, from_counts=from_counts)


@pytest.mark.parametrize("junk", [True, False])
@pytest.mark.parametrize("drafts", [[3, 3], 3])
@pytest.mark.parametrize("from_counts", [True, False])
def test_a_mask_too_short_is_filled_and_nothing_behind_it(triton_device, junk, drafts, from_counts):
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, -1]])  # all three of the first, two of the second
    for capacity in (0, 2, 4, 5):
        compare(ids, drafts, capacity, triton_device, junk=junk, from_counts=from_counts)


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


def test_the_drafts_are_told_once(triton_device):
    ones = torch.ones(2, dtype=torch.int32, device=triton_device)
    mask = torch.zeros(2, dtype=torch.bool, device=triton_device)
    for drafts, uniform in ((None, None), (ones, 1)):
        with pytest.raises(ValueError, match="drafts_per_request"):
            acceptance_mask_from_counts_triton(ones, drafts, mask, ones, uniform)
        with pytest.raises(ValueError, match="drafts_per_request"):
            acceptance_mask_triton(ones[:, None], drafts, VOCAB, mask, ones, uniform)


def test_more_drafts_than_a_program_writes_at_once(triton_device):
    ids = torch.tensor([[5, 6, 7], [5, -1, -1], [5, 6, -1]])
    compare(ids, [70, 33, 1], 110, triton_device)
    compare(torch.ones(1, 90, dtype=torch.int64), [100], 101, triton_device)


def test_strided_ids_and_counts_are_followed(triton_device):
    ids = torch.tensor([[1, 99, 2, 99, 3], [4, 99, -1, 99, -1]], device=triton_device)[:, ::2]
    drafts = torch.tensor([2, 99, 2, 99], dtype=torch.int32, device=triton_device)[::2]
    _, mask, _, counts = outputs(5, 2, triton_device)
    acceptance_mask_triton(ids, drafts, VOCAB, mask, counts)
    assert mask.tolist() == [True, True, False, False, False]
    assert counts.tolist() == [2, 0]


@pytest.mark.gpu
def test_a_captured_mask_follows_new_ids_without_capturing_anew():
    ids = torch.full((4, 5), -1, device="cuda")
    drafts = torch.full((4,), 4, dtype=torch.int32, device="cuda")
    _, mask, _, counts = outputs(16, 4, "cuda")
    run = lambda: torch.ops.nwor.acceptance_mask(ids, drafts, VOCAB, mask, counts)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    ids.copy_(torch.tensor([[1] * 5, [1, 2, -1, -1, -1], [-1] * 5, [3, -1, -1, -1, -1]]))
    graph.replay()
    assert counts.tolist() == [4, 1, 0, 0]
    assert mask.tolist() == [True] * 5 + [False] * 11


@pytest.mark.gpu
def test_a_captured_mask_follows_new_counts():
    num_sampled = torch.zeros(8, dtype=torch.int32, device="cuda")
    _, mask, _, counts = outputs(32, 8, "cuda")

    def run() -> None:
        torch.ops.nwor.acceptance_mask_from_counts(num_sampled, None, mask, counts, 4)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert not mask.any()
    num_sampled.copy_(torch.tensor([5, 0, 1, 3, 0, 0, 0, 2]))
    graph.replay()
    assert counts.tolist() == [4, 0, 0, 2, 0, 0, 0, 1]
    assert mask.view(8, 4).sum(dim=1).tolist() == [4, 0, 0, 2, 0, 0, 0, 1]
    assert mask.view(8, 4)[:, 0].tolist() == [True, False, False, True, *[False] * 3, True]
