"""Speculative cache validation: host and device agree, misfits are refused and counted."""

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from nwor_bench.plugin.runner_v1.staging import ValidationRefused, Validator, accepted_on_host
from nwor_bench.records.types import ScvMode

VOCAB = 20
CPU = torch.device("cpu")

DEVICE_MODES = [ScvMode.GRAPH, ScvMode.ADAPTIVE]


def make_validator(mode=ScvMode.OFF, capacity=64):
    validator = Validator(capacity, VOCAB, CPU)
    validator.mode = mode
    return validator


@st.composite
def windows(draw):
    """(sampled ids of any width and content, drafts of each request)."""
    drafts = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    width = draw(st.integers(0, 7))
    row = st.lists(st.integers(-1, VOCAB + 1), min_size=width, max_size=width)
    sampled = [draw(row) for _ in drafts]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return torch.tensor(sampled, dtype=dtype).reshape(len(drafts), width), drafts


@st.composite
def sampled_windows(draw):
    """(ids as rejection sampling returns them, drafts, accepted drafts) of each request."""
    drafts = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    kept = [draw(st.integers(0, n)) for n in drafts]
    prefills = [draw(st.booleans()) and n == 0 for n in drafts]
    width = max(drafts) + 1
    ids = torch.full((len(drafts), width), -1)
    for row, (count, prefill) in enumerate(zip(kept, prefills, strict=True)):
        if not prefill:
            ids[row, : count + 1] = draw(st.integers(0, VOCAB - 1))
    return ids, drafts, kept


@examples(150)
@given(window=windows(), mode=st.sampled_from(DEVICE_MODES))
def test_host_and_device_agree_on_any_ids(window, mode):
    ids, drafts = window
    host = make_validator().validate(ids, drafts)
    device = make_validator(mode).validate(ids, drafts)
    assert host.accepted.dtype is device.accepted.dtype is torch.bool
    assert host.accepted.tolist() == device.accepted.tolist()
    assert host.num_accepted == device.num_accepted
    assert host.accepted.shape == (sum(drafts),)
    assert all(type(count) is int for count in host.num_accepted + device.num_accepted)


@examples(100)
@given(window=sampled_windows(), mode=st.sampled_from(list(ScvMode)))
def test_what_rejection_sampling_decided_is_read_back(window, mode):
    ids, drafts, kept = window
    validation = make_validator(mode).validate(ids, drafts)
    assert validation.num_accepted == kept
    mask = [draft < k for n, k in zip(drafts, kept, strict=True) for draft in range(n)]
    assert validation.accepted.tolist() == mask
    assert accepted_on_host(ids.tolist(), drafts, VOCAB) == kept


@pytest.mark.parametrize("mode", list(ScvMode))
@pytest.mark.parametrize(
    ("sampled", "kept"),
    [([[1, 2], [3, -1]], [1, 0]), ([[1], [3]], [0, 0]), ([[], []], [0, 0])],
)
def test_ids_narrower_than_the_drafts_accept_what_they_can(mode, sampled, kept):
    ids = torch.tensor(sampled).long().reshape(2, -1)
    validation = make_validator(mode).validate(ids, (3, 2))
    assert validation.num_accepted == kept
    assert validation.accepted.tolist() == [
        draft < k for k, n in zip(kept, (3, 2), strict=True) for draft in range(n)
    ]


@pytest.mark.parametrize("mode", list(ScvMode))
@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (torch.ones(3, 4).long(), "sampled_ids_shape"),  # one request too many
        (torch.ones(1, 4).long(), "sampled_ids_shape"),
        (torch.ones(0, 4).long(), "sampled_ids_shape"),
        (torch.ones(2).long(), "sampled_ids_shape"),
        (torch.ones(2, 4, 1).long(), "sampled_ids_shape"),
        (torch.ones(()).long(), "sampled_ids_shape"),
        (torch.ones(2, 4), "sampled_ids_dtype"),
        (torch.ones(2, 4).half(), "sampled_ids_dtype"),
        (torch.ones(2, 4).bool(), "sampled_ids_dtype"),
        (torch.ones(2, 4, dtype=torch.complex64), "sampled_ids_dtype"),
    ],
)
def test_ids_that_cannot_belong_to_the_window_are_refused(mode, ids, reason):
    validator = make_validator(mode)
    with pytest.raises(ValidationRefused, match=f"^{reason}$"):
        validator.validate(ids, (3, 2))
    assert not validator.counters  # the caller counts a refusal, under its reason
    assert not validator.fallbacks


@pytest.mark.parametrize("mode", list(ScvMode))
def test_more_drafts_than_the_buffers_hold_are_refused(mode):
    validator = make_validator(mode, capacity=5)
    ids = torch.ones(2, 4).long()
    assert validator.validate(ids, (3, 2)).num_accepted == [3, 2]
    with pytest.raises(ValidationRefused, match=r"^more_drafts_than_capacity$"):
        validator.validate(ids, (3, 3))


def test_the_host_reference_counts_nothing():
    validator = make_validator()
    validation = validator.validate(torch.ones(1, 3).long(), (2,))
    assert (validation.path, validation.fallback_reason) == ("host", None)
    assert not validator.counters
    assert not validator.fallbacks


@pytest.mark.parametrize("mode", DEVICE_MODES)
def test_without_a_graph_the_kernel_runs_eagerly_and_each_time_is_counted(mode):
    validator = make_validator(mode)
    for _ in range(3):
        validation = validator.validate(torch.ones(1, 3).long(), (2,))
        assert (validation.path, validation.fallback_reason) == ("device", "no_cuda")
    assert validator.counters == {"scv_device_validations": 3, "scv_fallback_count": 3}
    assert validator.fallbacks == {"no_cuda": 3}


def test_fallbacks_are_counted_by_reason():
    validator = make_validator(ScvMode.GRAPH)
    for reason in ("sampled_ids_shape", "no_cuda", "sampled_ids_shape"):
        validator.count_fallback(reason)
    assert validator.counters == {"scv_fallback_count": 3}
    assert validator.fallbacks == {"sampled_ids_shape": 2, "no_cuda": 1}


def test_host_rows_may_differ_in_length():
    # The engine hands the sampled ids on as lists without their padding.
    assert accepted_on_host([[4, 5, 6], [7], []], (2, 3, 0), VOCAB) == [2, 0, 0]
