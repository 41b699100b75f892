"""Acceptance mask in Triton against the torch reference: interpreted, or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_inputs import SEEDS, generator

pytest.importorskip("triton")

from nwor_kernels.mask.kernel import acceptance_mask_triton
from nwor_kernels.mask.reference import acceptance_mask_reference

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


def compare(ids, drafts, capacity, device, *, junk=True):
    """Both implementations on outputs full of junk; all memory around them compared too."""
    counts = torch.tensor(drafts, dtype=torch.int32)
    expected = outputs(capacity, len(drafts), "cpu", junk=junk)
    acceptance_mask_reference(ids, counts, VOCAB, expected[1], expected[3])
    actual = outputs(capacity, len(drafts), device, junk=junk)
    acceptance_mask_triton(ids.to(device), counts.to(device), VOCAB, actual[1], actual[3])
    assert actual[0].tolist() == expected[0].tolist()
    assert actual[2].tolist() == expected[2].tolist()


@settings(deadline=None, max_examples=40)
@given(
    seed=SEEDS,
    drafts=st.lists(st.integers(0, 5), max_size=6),
    width=st.integers(0, 7),
    spare=st.integers(-3, 40),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    junk=st.booleans(),
)
def test_any_window_is_masked_as_by_the_reference(
    triton_device, seed, drafts, width, spare, dtype, junk
):
    capacity = max(sum(drafts) + spare, 0)
    ids = random_ids(len(drafts), width, seed, dtype)
    compare(ids, drafts, capacity, triton_device, junk=junk)


@pytest.mark.parametrize(
    ("requests", "width", "spare"), [(512, 5, 0), (3, 33, 7), (200, 2, 90), (1, 33, 500)]
)
def test_large_windows(triton_device, requests, width, spare):
    rng = generator(requests + width)
    drafts = torch.randint(0, width, (requests,), generator=rng).tolist()
    ids = random_ids(requests, width, requests, torch.int64)
    compare(ids, drafts, sum(drafts) + spare, triton_device)


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
