"""Copies that the driver makes directly, on the stand-in for it and on a GPU."""

import ctypes

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from driver_stand_in import DEVICE, STREAM

from nwor_kernels.cuda_driver import load_driver
from nwor_kernels.direct_copy import bind_copy
from nwor_kernels.direct_launch import refusals


class OnStandIn(Tensor):
    """A tensor in the host's memory that says it lies on the stand-in's device."""

    is_cuda = True
    device = torch.device("cuda", DEVICE)


class OnAnother(OnStandIn):
    """The same on the device beside it."""

    device = torch.device("cuda", DEVICE + 1)


def counts(number: int, kind: type[Tensor] = OnStandIn) -> Tensor:
    return torch.randint(1, 2**31, (number,), dtype=torch.int32).as_subclass(kind)


@pytest.mark.parametrize("number", [0, 1, 5, 8])
def test_a_copy_fills_the_first_and_leaves_the_rest(record, streams, number):
    kept = counts(8)
    copy = bind_copy(kept)
    for stream in (STREAM, 0x55):
        streams[DEVICE] = stream
        rest, given = kept.tolist()[number:], counts(number)
        copy(given)
        assert kept.tolist() == given.tolist() + rest
        assert record.stream == stream
    assert record.copies == 2
    assert not refusals


def test_what_does_not_lie_as_the_driver_wants_it_is_copied_by_torch(record):
    kept = counts(8)
    copy = bind_copy(kept)
    for given in (counts(16)[::2], counts(8).long(), counts(8, OnAnother)):
        assert kept.tolist() != given.tolist()
        copy(given)
        assert kept.tolist() == given.tolist()
    assert record.copies == 0


def test_what_does_not_fit_is_not_copied(record):
    before = (kept := counts(4)).tolist()
    for kind in (OnStandIn, OnAnother):
        with pytest.raises(ValueError, match="5 numbers do not fit 4"):
            bind_copy(kept)(counts(5, kind))
    assert (kept.tolist(), record.copies) == (before, 0)


def test_a_failed_copy_says_what_the_driver_said(record):
    record.answer = 1
    with pytest.raises(RuntimeError, match=r"cuMemcpyDtoDAsync: CUDA_ERROR_INVALID_VALUE \(1\)"):
        bind_copy(counts(4))(counts(4))


def test_without_the_driver_torch_copies_and_that_is_counted(record, monkeypatch):
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    load_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", absent)
    kept, given = counts(4), counts(3)
    bind_copy(kept)(given)
    assert kept.tolist()[:3] == given.tolist()
    assert list(refusals) == ["missing: libcuda.so.1: cannot open shared object file"]


@pytest.mark.gpu
def test_a_gpus_counts_arrive_on_the_current_stream():
    kept = torch.zeros(64, dtype=torch.int32, device="cuda")
    copy, stream = bind_copy(kept), torch.cuda.Stream()
    given = [torch.randint(1, 2**31, (n,), dtype=torch.int32, device="cuda") for n in (64, 7)]
    copy(given[0])
    assert kept.equal(given[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        copy(given[1])
    assert kept.equal(given[0])
    stream.synchronize()
    assert kept.equal(torch.cat([given[1], given[0][7:]]))
